"""A draft's gain beside the one that the cost model predicts: `python -m tools.predict_speculation --tokens 2 4`.

Two geometries with random weights. The draft model runs, and then an oracle replaces its draft tokens: each is right with a fixed
chance (`folovllm/spec_decode/oracle.py`), as with a draft model of that quality. The oracle must know the text, so only one token
is allowed at all: two engines with random weights would soon differ. Every draft has the same length. The prediction is

    (1 + a + ... + a^k) * plain / (verify + propose)

with the seconds of a step from the table that an engine measures when it starts, and the median time of proposing, waits included,
since the host must know what the oracle says. Engines with and without drafts take turns; the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from folovllm import LLM, EngineConfig, SamplingParams
from folovllm.bench.contenders import random_model, write_geometry
from folovllm.engine.setup import set_up
from folovllm.setup import EngineSetup
from folovllm.spec_decode.draft_model import DraftModel, draft_setup
from folovllm.spec_decode.extension import make_multi_step_executor
from folovllm.spec_decode.measure import measure_steps
from folovllm.spec_decode.multi_step import DraftTokens
from folovllm.spec_decode.oracle import Oracle
from folovllm.spec_decode.policy import FixedLength
from folovllm.spec_decode.proposer import RowState
from tools.measure_speculation import answer

TOKEN = 1234  # all that is written


class ToldDraft(DraftModel):
    """A draft model whose tokens an oracle replaces. `seconds` has what each call took."""

    def __init__(self, setup: EngineSetup, longest: int) -> None:
        """`setup` describes the draft."""
        executor = make_multi_step_executor(setup, DraftTokens.for_multi_step(longest, setup))
        super().__init__(
            executor, setup.max_num_seqs, setup.max_num_batched_tokens, setup.max_model_len, setup.block_size
        )
        self.oracle = Oracle({})
        self.seconds: list[float] = []

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """As `Proposer`."""
        start = time.perf_counter()
        found = super().propose_all(states, ks)
        self.seconds.append(time.perf_counter() - start)
        return found

    def _write(self, ready: list[tuple[RowState, int]]) -> dict[int, list[int]]:
        super()._write(ready)
        return {state.seq_id: self.oracle.propose(state, k) for state, k in ready}


def drafting_engine(model: dict[str, Any], draft: str, k: int) -> tuple[LLM, ToldDraft]:
    """The engine and its draft, `draft` being a folder with a geometry."""
    small = draft_setup(set_up(EngineConfig(**model)), draft)
    small = replace(small, config=replace(small.config, random_weights=True, model_impl="native"))
    told = ToldDraft(small, k + 2)
    return LLM(**model, speculative_config={"method": told, "num_speculative_tokens": k}), told


def compare(plain: LLM, drafting: LLM, told: ToldDraft, arguments: argparse.Namespace, batch: int, k: int) -> None:
    """Print a line: what was measured, and what was predicted."""
    die = random.Random(0)
    ids = [die.choices(range(300, 4000), k=arguments.prompt) for _ in range(batch)]
    prompts: list[Any] = [{"prompt_token_ids": own} for own in ids]
    only = SamplingParams(temperature=0, ignore_eos=True, max_tokens=arguments.answer, allowed_token_ids=[TOKEN])
    params, text = [only] * batch, [TOKEN] * arguments.answer
    told.oracle = Oracle({tuple(own): text for own in ids}, arguments.chance)
    answer(plain, prompts, params, batch)
    counts = drafting.engine.scheduler.speculation
    counts.policy = FixedLength(k)
    answer(drafting, prompts, params, batch)
    told.seconds.clear()
    before, gains = (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted), []
    for _ in range(arguments.rounds):
        slow = answer(plain, prompts, params, batch)
        fast = answer(drafting, prompts, params, batch)
        gains.append(slow.behind_first / fast.behind_first)
    drafts, drafted, accepted = np.subtract((counts.num_drafts, counts.num_draft_tokens, counts.num_accepted), before)
    cost, propose = measure_steps(drafting.engine.executor, drafting.engine.setup, k), statistics.median(told.seconds)
    tokens, came = sum(arguments.chance**i for i in range(k + 1)), 1 + accepted / drafts
    step, verify = cost.plain.at(batch), cost.verifying.at(batch * (k + 1))
    gain = step / (verify + propose)  # of each token
    assert slow.texts == fast.texts == [text] * batch
    print(
        f"batch {batch}, {k} draft tokens: plain {1e3 * slow.behind_first:.3f} ms a token, with drafts {1e3 * fast.behind_first:.3f} ms, "
        f"{statistics.median(gains):.2f} x; predicted {tokens * gain:.2f} x, and {came * gain:.2f} x "
        f"of the tokens that came: a step of {1e3 * step:.3f}, {1e3 * verify:.3f} with drafts, which take {1e3 * propose:.3f} ms to propose; "
        f"{came:.2f} tokens a step with a draft, predicted {tokens:.2f}; {accepted} of {drafted} accepted",
        flush=True,
    )


def main() -> None:
    """Print a line for each number of draft tokens and each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4b", help="a geometry")
    parser.add_argument("--draft", default="qwen3-0.6b", help="a geometry with the same vocabulary")
    parser.add_argument("--chance", type=float, default=0.7, help="that a draft token is accepted")
    parser.add_argument("--tokens", nargs="+", type=int, default=[4], help="draft tokens for a sequence in a step")
    parser.add_argument("--batches", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=400)
    arguments = parser.parse_args()
    common: dict[str, Any] = {"use_tqdm": False, "max_num_seqs": max(8, *arguments.batches), "max_model_len": 1024}
    common["num_kv_blocks"] = 64 * (common["max_num_seqs"] + 1)
    if torch.cuda.is_available():
        common["dtype"] = "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(arguments.model, Path(folder), common)
        draft = str(write_geometry(arguments.draft, Path(folder)))
        plain = LLM(**model)
        drafting, told = drafting_engine(model, draft, max(arguments.tokens))
        for k in arguments.tokens:
            for batch in arguments.batches:
                compare(plain, drafting, told, arguments, batch, k)


if __name__ == "__main__":
    main()
