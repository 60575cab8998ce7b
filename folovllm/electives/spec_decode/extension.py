"""The extension that adds speculative decoding to an engine: its runners, its scheduler, and the kernel that verifies."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from folovllm.electives.spec_decode import attention
from folovllm.electives.spec_decode.chain import ChainGraphRunner, DraftTokens
from folovllm.electives.spec_decode.chain_proposer import HeadProposer
from folovllm.electives.spec_decode.config import SpeculativeConfig
from folovllm.electives.spec_decode.draft_model import DraftModel, DraftModelRunner, draft_setup
from folovllm.electives.spec_decode.head_runner import HeadGraphRunner, HeadModelRunner
from folovllm.electives.spec_decode.head_setup import check_head, make_head
from folovllm.electives.spec_decode.measure import clock_for, measure_drafting, measure_steps
from folovllm.electives.spec_decode.ngram import NgramProposer
from folovllm.electives.spec_decode.policy import TRUSTED, AdaptiveLength, LengthPolicy
from folovllm.electives.spec_decode.proposer import CompositeProposer, Proposer
from folovllm.electives.spec_decode.scheduler import SpeculativeScheduler
from folovllm.electives.spec_decode.speculation import DraftRules, Speculation
from folovllm.electives.spec_decode.suffix import SuffixProposer
from folovllm.electives.spec_decode.verify import DraftVerifier, max_samples
from folovllm.electives.spec_decode.verify_runner import VerifyingModelRunner
from folovllm.engine.build_packed import make_packed_worker
from folovllm.engine.extension import Extension
from folovllm.executor.packed_executor import LocalExecutor

if TYPE_CHECKING:
    from folovllm.attention.backends.abstract import AttentionBackend
    from folovllm.engine.extension import MakeGraphRunner, MakeScheduler
    from folovllm.engine.setup import EngineSetup
    from folovllm.executor.abstract import Executor
    from folovllm.layers.layer_set import LayerSet
    from folovllm.worker.model_runner import ModelRunner

BACK_OFF = 800  # of a draft model or a head, which take device time in plain steps, too: `AdaptiveLength`


class SpeculativeDecoding(Extension):
    """Several tokens of a sequence in a step: proposed in the driver, verified on the device."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._config: SpeculativeConfig = setup.config.extras["speculative_config"]
        self._proposer: Proposer | None = None
        self._drafted: DraftTokens | None = None

    def prepare(self) -> None:
        """Make the proposer. A draft model has weights and a cache of its own."""
        config = self._config
        if config.head is not None:
            check_head(self.setup, config)
        if "draft_model" in config.methods:  # which drafts the token in flight, too
            self._drafted = make_draft_tokens(self.setup, config.num_speculative_tokens + 1)
        if isinstance(config.method, str):
            proposers = [self._make_proposer(name) for name in config.methods]
            self._proposer = proposers[0] if len(proposers) == 1 else CompositeProposer(proposers)
        else:
            self._proposer = CompositeProposer([config.method], self.setup.vocab_size)

    def _make_proposer(self, name: str) -> Proposer:
        """Return the proposer of that name. Raises ValueError where it cannot be made."""
        if name == "ngram":
            return NgramProposer(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
        if name == "suffix":
            return SuffixProposer()
        if name == self._config.head:
            return HeadProposer(self.setup.vocab_size, self.setup.max_num_seqs, self.setup.config.packed_steps)
        assert self._config.model is not None and self._drafted is not None
        draft, config = draft_setup(self.setup, self._config.model), self.setup.config
        on_device = config.packed_steps and config.tensor_parallel_size == 1  # where the large model finds the drafts
        return DraftModel(make_draft_executor(draft, self._drafted), draft, on_device)

    def num_samples(self) -> int:
        """Return the samples of sequences with drafts, and one for each sequence that is admitted to the same step."""
        return max_samples(self.setup.max_num_seqs) + self.setup.max_num_seqs

    def attention_backend(self, usual: Callable[[], AttentionBackend]) -> AttentionBackend:
        """Return Triton's backend with a kernel that verifies, where the device has it, else the usual one."""
        if self.setup.backend != "triton" or not attention.serves(self.setup.device):
            return usual()
        most_tokens = self._config.num_speculative_tokens + 1
        return attention.TritonVerifyBackend(self.setup.attention, most_tokens, max_samples(self.setup.max_num_seqs))

    def layer_set(self, usual: Callable[[], LayerSet]) -> LayerSet:
        """Return the usual layers. They learn how many tokens of a sequence a step may sample."""
        return replace(usual(), most_samples=self._config.num_speculative_tokens + 1)

    def model_runner(self, usual: type[ModelRunner]) -> type[ModelRunner]:
        """Return a runner that samples several tokens of a sequence, and that runs the draft head if there is one."""
        if self._config.head is None:
            return VerifyingModelRunner
        make, most_drafts = partial(make_head, self.setup, self._config), self._config.num_speculative_tokens
        return cast("type[ModelRunner]", partial(HeadModelRunner, make_head=make, most_drafts=most_drafts))

    def graph_runner(self, usual: MakeGraphRunner) -> MakeGraphRunner:
        """Return the graph runner with a verifier, which resolves placeholder ids of a draft model or a head."""
        if self._config.head is not None:  # every rank has its own
            drafted = make_draft_tokens(self.setup, self._config.num_speculative_tokens)
            verifier = DraftVerifier(max_samples(self.setup.max_num_seqs), drafted)
            return partial(HeadGraphRunner, drafted=drafted, verifier=verifier)
        return partial(usual, verifier=DraftVerifier(max_samples(self.setup.max_num_seqs), self._drafted))

    def scheduler(self, usual: MakeScheduler, executor: Executor) -> MakeScheduler:
        """Return a scheduler that asks the proposer. What steps cost on this executor decides the draft lengths."""
        assert self._proposer is not None
        self._proposer.bind(executor, lambda seq_id: 0)  # the made-up sequence of a measurement
        self._speculation = Speculation(self._proposer, self._policy(executor), DraftRules(), clock_for(self.setup))
        num_recomputed = int(self._config.head is not None)
        return partial(
            SpeculativeScheduler, speculation=self._speculation, executor=executor, num_recomputed=num_recomputed
        )

    def limit_drafts(self, rules: DraftRules) -> None:
        """Let the grammars of structured output limit drafts from now on."""
        self._speculation.rules = rules

    def _policy(self, executor: Executor) -> LengthPolicy:
        """Return the length policy. Under torchrun all ranks must decide the same, so times must not matter there."""
        config, setup = self._config, self.setup
        most = config.num_speculative_tokens
        if not config.adaptive or not config.methods or "TORCHELASTIC_RUN_ID" in os.environ:
            return LengthPolicy(most)
        cost = measure_steps(executor, setup, most)
        if "draft_model" not in config.methods and config.head is None:
            return AdaptiveLength(cost, most)
        assert self._proposer is not None
        measure_drafting(executor, setup, self._proposer, most, cost)
        return AdaptiveLength(cost, most, TRUSTED, BACK_OFF)

    def close(self) -> None:
        """Close the proposer, and a draft model with it."""
        if self._proposer is not None:
            self._proposer.close()


class Drafting(Extension):
    """The extension of a draft model's own worker."""

    def __init__(self, setup: EngineSetup, drafted: DraftTokens) -> None:
        super().__init__(setup)
        self._drafted = drafted

    def model_runner(self, usual: type[ModelRunner]) -> type[ModelRunner]:
        """Return a runner of chains."""
        return DraftModelRunner

    def graph_runner(self, usual: MakeGraphRunner) -> MakeGraphRunner:
        """Return a runner that captures chains and writes what they sample into `drafted`."""
        return partial(ChainGraphRunner, drafted=self._drafted)


def make_draft_tokens(setup: EngineSetup, longest: int) -> DraftTokens:
    """Return room for chains of up to `longest` tokens. `setup` describes the model that verifies."""
    return DraftTokens(setup.vocab_size, longest + 1, setup.max_num_seqs, setup.device)


def make_draft_executor(setup: EngineSetup, drafted: DraftTokens) -> LocalExecutor:
    """Return the executor of a draft model."""
    return LocalExecutor(setup.max_num_seqs, *make_packed_worker(setup, extension=Drafting(setup, drafted)))
