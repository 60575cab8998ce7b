"""Beam search on top of the engine: each step asks for one token of every beam, and keeps the best continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from folovllm.engine.inputs import Prompt, is_one_prompt, parse_prompt
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.long_prompts import encode_whole
from folovllm.engine.prompt_forms import TokensPrompt
from folovllm.engine.require import Limits, check_fields, require, takes_vllm_arguments
from folovllm.models.files import eos_token_ids
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams

Generate = Callable[[list[TokensPrompt], SamplingParams], list[RequestOutput]]


@takes_vllm_arguments("beams")
@dataclass(slots=True)
class BeamSearchParams:
    """How to search.

    Attributes:
        beam_width: beams that are kept in each step, and answers in the end; at most half of the engine's `max_logprobs`.
        max_tokens: of an answer.
        ignore_eos: go on past the end of the text.
        length_penalty: beams are compared by their log-probability over their length (prompt included) to this power, from -50 to 50.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_fields(type(self), asdict(self), {"length_penalty": Limits(-50, 50, "from -50 to 50")})


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: the tokens of prompt and answer, and their text in the end."""

    tokens: list[int]
    cum_logprob: float = 0.0
    finish_reason: str | None = None
    text: str | None = None
    cache_salt: str | None = None  # the prompt's


@dataclass(slots=True)
class BeamSearchOutput:
    """The best beams of one prompt, the best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def search_beams(
    engine: LLMEngine, generate: Generate, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Return the best `beam_width` answers to each prompt that the search finds. `generate` answers prompts by `engine`."""
    require(isinstance(params, BeamSearchParams), f"params must be a BeamSearchParams, not {params!r}")
    setup, tokenizer = engine.setup, engine.get_tokenizer()
    most = setup.config.max_logprobs // 2  # of each beam twice as many tokens are looked at as there are beams
    wide = f"beam_width is {params.beam_width}, and this engine searches {most} beams at most"
    require(params.beam_width <= most, f"{wide}: ask for fewer, or raise max_logprobs to {2 * params.beam_width}")
    ends = frozenset() if params.ignore_eos else eos_token_ids(setup.path, setup.hf_config, tokenizer)
    items = [prompts] if is_one_prompt(prompts) else cast("Sequence[Prompt]", prompts)
    searches = [BeamSearch(encode_whole(tokenizer, parts), parts.cache_salt) for parts in map(parse_prompt, items)]
    for _ in range(params.max_tokens):
        if not (beams := [beam for search in searches for beam in search.open]):
            break
        following = iter(_next_tokens(generate, beams, 2 * params.beam_width))
        for search in searches:
            search.advance([next(following) for _ in search.open], ends, setup.max_model_len, params)
    return [BeamSearchOutput([_with_text(beam, tokenizer) for beam in search.best(params)]) for search in searches]


def _next_tokens(generate: Generate, beams: list[BeamSearchSequence], count: int) -> list[dict[int, float]]:
    """For each beam its `count` most likely next tokens with their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=count, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=beam.tokens, cache_salt=beam.cache_salt) for beam in beams]
    outputs = generate(prompts, params)
    rows = [(output.outputs[0].logprobs or [])[0] for output in outputs]
    return [{token: entry.logprob for token, entry in row.items()} for row in rows]


class BeamSearch:
    """The beams of one prompt. An ended beam is set aside, so that as many open ones go on as the search is wide (as in vLLM)."""

    def __init__(self, prompt: list[int], cache_salt: str | None) -> None:
        self.open = [BeamSearchSequence(prompt, cache_salt=cache_salt)]
        self._ended: list[BeamSearchSequence] = []

    def advance(
        self, following: list[dict[int, float]], ends: frozenset[int], max_model_len: int, params: BeamSearchParams
    ) -> None:
        """Give each open beam each of its next tokens; the best `beam_width` of those that have not ended stay open.

        Args:
            following: for each open beam its next tokens, with their log-probabilities.
            ends: tokens that end a beam; a full context ends it, too.
        """
        longer: list[BeamSearchSequence] = []
        for beam, row in zip(self.open, following, strict=True):
            for token, logprob in row.items():
                tokens = [*beam.tokens, token]
                reason = "stop" if token in ends else "length" if len(tokens) >= max_model_len else None
                kind = longer if reason is None else self._ended
                kind.append(BeamSearchSequence(tokens, beam.cum_logprob + logprob, reason, None, beam.cache_salt))
        self.open, self._ended = _best(longer, params), _best(self._ended, params)

    def best(self, params: BeamSearchParams) -> list[BeamSearchSequence]:
        """The best `beam_width` of all beams, ended or open."""
        return _best([*self._ended, *self.open], params)


def _best(beams: list[BeamSearchSequence], params: BeamSearchParams) -> list[BeamSearchSequence]:
    """The beams with the highest log-probability over the length to a power. An end-of-text id does not count as length."""

    def score(beam: BeamSearchSequence) -> float:
        return beam.cum_logprob / (len(beam.tokens) - (beam.finish_reason == "stop")) ** params.length_penalty

    return sorted(beams, key=score, reverse=True)[: params.beam_width]


def _with_text(beam: BeamSearchSequence, tokenizer: Any) -> BeamSearchSequence:
    text = tokenizer.decode(beam.tokens, skip_special_tokens=True)
    return replace(beam, finish_reason=beam.finish_reason or "length", text=text)
