"""`ServerConfig`: what a server has beside its engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from folovllm.electives.server.reasoning import PARSERS
from folovllm.electives.structured_output.params import GrammarLimits

ROLES = ("prefill", "decode")
HOST = re.compile(r"\*|[\w.-]+", re.ASCII)
ORIGIN = re.compile(  # pages of other schemes have none
    r"\*|null|(?!(?:ftp|wss?|file|data|blob|about|javascript):)[a-z][a-z0-9+.-]*://(?:(?![/?#@])[!-~])+",
    re.ASCII | re.IGNORECASE,
)


def is_origin(text: str) -> bool:
    """Whether a browser may name a page so."""
    port = re.search(r":(\d+)$", text)
    return ORIGIN.fullmatch(text) is not None and (port is None or int(port[1][:6]) <= 65535)


Rule = tuple[tuple[str, ...], Callable[[Any], object], str]  # fields, what holds of each value, and in words
RULES: tuple[Rule, ...] = (
    (("port",), lambda value: 0 <= value < 65536, "between 0 and 65535"),
    (("max_queued_requests", "max_queued_tokens", "max_body_size", "grammar_memory"), lambda n: n >= 1, "at least 1"),
    (("grammar_seconds", "peer_seconds"), lambda value: 0 < value < inf, "above 0"),
    (("drain_seconds",), lambda value: value >= 0, "0 or more"),
    (("reasoning_parser",), lambda name: name in (None, *PARSERS), f"one of {', '.join(PARSERS)}"),
    (("role",), lambda name: name in (None, *ROLES), f"one of {', '.join(ROLES)}"),
    (("api_key",), re.compile(r"[!-~]([ -~]*[!-~])?").fullmatch, "printable ASCII, no space around it"),
    (("served_model_name",), lambda s: s.isprintable() and s == s.strip() != "", "printable, no space around it"),
    (("allowed_host", "inspector_host"), HOST.fullmatch, "a name as page.example, without http:// and port"),
    (("cors_origin",), is_origin, "an origin as https://page.example:8443, without a path, with a port up to 65535"),
)


@dataclass(slots=True, kw_only=True)
class ServerConfig:
    """How the engine is offered; each field is a flag of `folovllm serve`.

    Attributes:
        host: address to listen at; by default this machine alone can ask.
        port: port to listen at; 0 takes a free one.
        served_model_name: names that requests may call the model by; the first is shown. If left out, the model's as given.
        api_key: a key that requests must bring (`Authorization: Bearer ...`); several may be given. The variable
            FOLOVLLM_API_KEY, keys with commas between them, says the same and is not seen in the list of processes.
        cors_origin: an origin whose pages may ask from a browser; "*" is any. Several may be given.
        allowed_host: a name by which a server without a key may be asked, beside localhost, this machine's own, that of `host`
            and addresses in numbers; "*" is any. Several may be given.
        engine_process: run the engine in a process of its own; if left out, where it has a GPU.
        max_queued_requests: most sequences (prompts times `n`) that wait for their first token; a request beyond is answered 429.
        max_queued_tokens: most tokens in all their prompts together.
        max_body_size: longest request, in bytes.
        grammar_seconds: most processor time to check a request's grammar, JSON schema or regular expression, in a process
            of its own; what takes more is refused.
        grammar_memory: most memory for that, in MiB.
        drain_seconds: at SIGTERM, how long answers that run may take to end.
        reasoning_parser: take what the model thinks out of its answers, into `reasoning_content`: qwen3, or deepseek_r1 for
            models whose answers begin in thought without a tag.
        inspector: show what the engine does, prompts and answers too, at /inspector.
        enable_sleep_mode: answer POST /sleep, POST /wake_up and GET /is_sleeping, as vLLM does (X6).
        role: prefill computes prompts for other servers, decode has its prompts computed by one (X7).
        peer: HOST:PORT where the two meet: a prefill server listens there, a decode server asks there. The variable
            FOLOVLLM_PEER_SECRET is their secret; without one both must be on one machine.
        peer_seconds: how long a request may wait for the peer; then its prompt is computed here.
        inspector_host: the same as `allowed_host`.
        ignore_unknown_fields: pass over fields of requests that nobody knows, instead of refusing them.

    Raises:
        ValueError: a value is out of range; the sentence says what does.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: list[str] = field(default_factory=list)
    api_key: list[str] = field(default_factory=list)
    cors_origin: list[str] = field(default_factory=list)
    allowed_host: list[str] = field(default_factory=list)
    engine_process: bool | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    max_body_size: int = 16 << 20
    grammar_seconds: float = GrammarLimits.seconds
    grammar_memory: int = GrammarLimits.memory
    drain_seconds: float = 30.0
    reasoning_parser: str | None = None
    inspector: bool = False
    enable_sleep_mode: bool = False
    role: str | None = None
    peer: str | None = None
    peer_seconds: float = 10.0
    inspector_host: list[str] = field(default_factory=list)
    ignore_unknown_fields: bool = False

    def __post_init__(self) -> None:
        for names, holds, says in RULES:
            for name in names:
                value = getattr(self, name)
                for each in value if isinstance(value, list) else [value]:
                    if not holds(each):
                        raise ValueError(f"{name} must be {says}, not {each!r}")
        if (self.role is None) != (self.peer is None):
            raise ValueError("role and peer belong together: give both, or none")
        self.cors_origin = [  # as browsers write it
            re.sub(r"^(http://.+):80$|^(https://.+):443$", r"\1\2", origin.lower()) for origin in self.cors_origin
        ]
