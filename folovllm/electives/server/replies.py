"""The JSON of replies, after OpenAI's API: messages, log-probabilities, and what is told of a tokenizer."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable
from typing import Any

from folovllm.electives.server.reasoning import ReasoningSplitter
from folovllm.electives.server.tool_calls import ToolCallParser
from folovllm.engine.logprobs import chosen, prompt_logprobs_of, with_text
from folovllm.engine.output_processor import RequestState
from folovllm.outputs import TokenLogprob

Row = dict[int, TokenLogprob]  # of one token, which comes first, and of likely others
Json = dict[str, Any]


class MessageReader:
    """Reads the text of one answer, whole or piece by piece. Without `thoughts` and `calls` all text is content."""

    def __init__(self, thoughts: ReasoningSplitter | None = None, calls: ToolCallParser | None = None) -> None:
        self._thoughts, self._calls = thoughts, calls

    def read(self, content: str, reason: str | None) -> tuple[Json, str | None]:
        """What a piece of the answer adds to its message, and the finish reason."""
        thought, calls = "", list[Json]()
        if self._thoughts is not None:
            thought, content = self._thoughts.feed(content, reason is not None)
        if self._calls is not None:
            content, calls = self._calls.feed(content, reason is not None)
            if self._calls.num_calls and reason == "stop":
                reason = "tool_calls"
        message = {"content": content, "reasoning_content": thought, "tool_calls": calls}
        return {name: value for name, value in message.items() if value}, reason


def completion_logprobs(rows: Iterable[Row], offsets: Iterable[int]) -> dict[str, list[Any]]:
    """The rows of some tokens, which begin at `offsets` in the text. Each row's likely tokens have names of their own."""
    tops = []
    for row in rows:
        top: dict[str, float] = {}
        for token in row.values():
            name = completion_token(token)
            top[name if name not in top else f"token_id:{token.token_id}"] = token.logprob
        tops.append(top)
    return {
        "text_offset": list(offsets),
        "token_logprobs": [next(iter(top.values())) for top in tops],
        "tokens": [next(iter(top)) for top in tops],
        "top_logprobs": tops,
    }


def completion_token(token: TokenLogprob) -> str:
    """A token's text; of one that is a part of a character its bytes, as OpenAI's API writes them."""
    text, spelled = token.decoded_token or "", token.token_bytes or b""
    return text if text.encode() == spelled else "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def chat_logprobs(rows: Iterable[Row], num_top: int) -> Json:
    """The chosen token of each row, with the `num_top` most likely ones. The bytes of an answer's tokens make up its text."""

    def shown(token: TokenLogprob) -> Json:
        return {
            "token": token.decoded_token or "",
            "logprob": token.logprob,
            "bytes": list(token.token_bytes or b""),
        }

    def likely(row: Row) -> list[TokenLogprob]:
        return sorted(row.values(), key=lambda token: token.rank)[:num_top]

    return {"content": [shown(chosen(row)) | {"top_logprobs": list(map(shown, likely(row)))} for row in rows]}


def prompt_logprobs(request: RequestState) -> list[Json | None]:
    """Those of a prompt's tokens, by token id, as vLLM's servers say them; an empty list if its request was aborted."""

    def shown(token: TokenLogprob) -> Json:
        return {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.decoded_token}

    rows = prompt_logprobs_of(request.seqs[0]) or ()
    return [None if row is None else {str(id_): shown(token) for id_, token in row.items()} for row in rows]


def echoed(
    request: RequestState, decode: Callable[[list[int]], str], num_logprobs: int | None
) -> tuple[str, list[Row], list[int]]:
    """A prompt as it stands before its answer: its text, and its tokens' log-probabilities and offsets, if they are asked for.

    `decode` is for prompts that came as ids. A row has the token and `num_logprobs` more; the first one has no meaning.
    """
    seq, rows = request.seqs[0], list[Row]()
    text = decode(request.prompt_token_ids) if request.prompt is None else request.prompt
    scored = prompt_logprobs_of(seq)
    if num_logprobs is not None and scored is not None:  # an answer that was aborted has none
        first = with_text([(request.prompt_token_ids[0], 0.0, 1)], seq.detokenizer.spelling)
        rows = [first, *(dict(list(row.items())[: 1 + num_logprobs]) for row in scored if row)]
    return text, rows, offsets_in(text, list(map(chosen, rows)))


def offsets_in(prompt: str, tokens: list[TokenLogprob]) -> list[int]:
    """Where each token begins in `prompt`, which ends with these tokens. A token that the tokenizer put in front begins at 0."""
    decoder, ends = getincrementaldecoder("utf-8")("replace"), [0]
    for i, token in enumerate(tokens, 1):
        ends.append(ends[-1] + len(decoder.decode(token.token_bytes or b"", i == len(tokens))))
    return [max(0, len(prompt) - ends[-1] + at) for at in ends[:-1]]


def tokenizer_info(tokenizer: Any) -> Json:
    """What `/tokenizer_info` tells of a tokenizer: how texts become ids, and conversations texts, by the names of `tokenizer_config.json`. No path of this machine is among them."""
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    added = {str(id_): {flag: getattr(t, flag) for flag in flags} for id_, t in tokenizer.added_tokens_decoder.items()}
    named = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    template = getattr(tokenizer, "chat_template", None)
    return named | {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "chat_template": template if isinstance(template, str) else None,
        "extra_special_tokens": [token for token in tokenizer.all_special_tokens if token not in named.values()],
        "added_tokens_decoder": added,
    }
