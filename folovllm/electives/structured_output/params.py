"""What an answer must be: a choice, a JSON document, a text that a regular expression or a grammar describes."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass, fields
from reprlib import repr as shown  # of a long value, its beginning
from typing import Any

from folovllm.engine.require import takes_vllm_arguments

KINDS = ("json", "regex", "choice", "grammar", "json_object")
LONGEST = 1 << 16  # characters of a description: the engine waits while it is compiled, up to a second
LONGEST_CHOICE = 1000  # characters of one
TEXT, SWITCH = (str, "a text that is not empty"), (bool, "True or False")
TYPES: dict[str, tuple[Any, str]] = {  # of each field, in Python and in words
    "json": (str | dict | bool, "a JSON schema, an object"),
    "regex": TEXT,
    "choice": (list | tuple, "a list of texts, at least one, none of them empty"),
    "grammar": TEXT,
    "json_object": SWITCH,
    "whitespace_pattern": TEXT,
    "disable_any_whitespace": SWITCH,
    "strict": SWITCH,
    "after": TEXT,
}


@dataclass(frozen=True)
class GrammarLimits:
    """What the check of one grammar may take: seconds of a processor's time, and MiB."""

    seconds: float = 0.5
    memory: int = 128


@takes_vllm_arguments("structured")
@dataclass(slots=True)
class StructuredOutputsParams:
    """The form of an answer: exactly one of the first five, by vLLM's names.

    Attributes:
        json: a JSON schema, as a dictionary or as text; kept as text.
        regex: a regular expression that the whole answer matches; Rust's dialect, which has no look-around.
        choice: the texts that the answer may be.
        grammar: a context-free grammar, in Lark's notation or in GBNF.
        json_object: any JSON object.
        whitespace_pattern: a regular expression of what may stand between the parts of a JSON document; None: a space, or a
            new line that is indented.
        disable_any_whitespace: nothing stands there.
        strict: False passes over keywords of the schema that cannot be kept; else they are an error.
        after: the answer has the form from behind this text on, and what comes before is free: for models that think first,
            up to "</think>". None: it has the form from its beginning.

    Raises:
        ValueError: none of them is given or several are, or one is of the wrong kind.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    strict: bool = True
    after: str | None = None

    def __post_init__(self) -> None:
        for own in fields(self):
            if (value := getattr(self, own.name)) is not own.default:
                _check(own.name, value)
        self.json_object = self.json_object or None
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"{' and '.join(given)} are given" if given else "nothing is given"
            raise ValueError(f"structured_outputs wants exactly one of {', '.join(KINDS)}: {what}")
        if self.json is not None:
            self.json = _as_text(self.json)

    @property
    def kind(self) -> str:
        """Which of `KINDS` is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def schema(self) -> dict[str, Any] | bool:
        """The JSON schema, of `json` or `json_object`."""
        schema: dict[str, Any] | bool = json_module.loads(str(self.json)) if self.json else {"type": "object"}
        return schema


def as_params(given: Any) -> StructuredOutputsParams:
    """What `SamplingParams.structured_outputs` may be: parameters, or a dictionary of their fields. Raises ValueError for anything else."""
    if isinstance(given, StructuredOutputsParams):
        return given
    if not isinstance(given, dict):
        raise ValueError(f"structured_outputs is a StructuredOutputsParams, not {given!r}")
    return StructuredOutputsParams(**given)


def _check(name: str, value: Any) -> None:
    """Raise ValueError for the value of a field that is of the wrong type, empty, too long, or has no bytes."""
    (kind, says), texts = TYPES[name], value if name == "choice" else [value]
    has_type = isinstance(value, kind) and (name != "choice" or all(isinstance(text, str) for text in texts))
    if not has_type or not texts or "" in texts:
        raise ValueError(f"{name} must be {says}, not {shown(value)}")
    texts = [text for text in texts if isinstance(text, str)]
    if sum(map(len, texts)) > LONGEST or (name == "choice" and max(map(len, texts)) > LONGEST_CHOICE):
        each = f" ({LONGEST_CHOICE} a text)" if name == "choice" else ""
        raise ValueError(f"{name} has more than {LONGEST} characters{each}: take a simpler form")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds an unpaired surrogate, half a character") from error


def _as_text(schema: str | dict[str, Any] | bool) -> str:
    """A JSON schema as compact JSON, which a later change of the caller's own does not reach. Raises ValueError if it is none."""
    try:
        read = json_module.loads(schema, parse_constant=refuse_constant) if isinstance(schema, str) else schema
        text = json_module.dumps(read, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json must be a JSON schema: {error}") from error
    if not isinstance(read, dict | bool):
        raise ValueError(f"json must be a JSON schema, an object, not {shown(read)}")
    if len(text) > LONGEST:
        raise ValueError(f"json must be a JSON schema: it has more than {LONGEST} characters")
    return text


def refuse_constant(name: str) -> None:
    """Raise ValueError for what Python reads and JSON does not have: NaN, Infinity."""
    raise ValueError(f"JSON has no {name}")
