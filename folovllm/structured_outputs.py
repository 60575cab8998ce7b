"""What an answer must be: a choice, a JSON document, a text that a regular expression or a grammar describes."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from typing import Any

from folovllm.vllm_arguments import STRUCTURED, also_takes

KINDS = ("json", "regex", "choice", "grammar", "json_object")
LONGEST = 1 << 16  # characters of a description: the engine waits while it is compiled, up to a second
LONGEST_CHOICE = 1000  # characters of one


@also_takes(STRUCTURED)
@dataclass(slots=True)
class StructuredOutputsParams:
    """The form of an answer: exactly one of the first five, by vLLM's names.

    Attributes:
        json: a JSON schema, as a dictionary or as text.
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
        given = [name for name in KINDS if getattr(self, name) not in (None, False) or self._is_schema(name)]
        if len(given) != 1:
            what = f"{' and '.join(given)} are given" if given else "nothing is given"
            raise ValueError(f"structured_outputs wants exactly one of {', '.join(KINDS)}: {what}")
        (self._check_choice if given[0] == "choice" else self._check_text)(given[0])
        for name in ("whitespace_pattern", "after"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise ValueError(f"{name} must be a text that is not empty, not {text!r}")

    def _is_schema(self, name: str) -> bool:
        """Whether this is the schema False: nothing is valid, but it is one."""
        return name == "json" and self.json is False

    def _check_choice(self, _: str) -> None:
        texts = self.choice
        if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"choice must be a list of texts, at least one, not {texts!r}")
        if not all(texts):
            raise ValueError("a choice must not be empty: an answer is at least a character long")
        if max(map(len, texts)) > LONGEST_CHOICE or sum(map(len, texts)) > LONGEST:
            raise ValueError(
                f"choice must have at most {LONGEST_CHOICE} characters each and {LONGEST} in all: take regex or grammar"
            )
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise ValueError("choice holds half a character, which no text has") from error

    def _check_text(self, kind: str) -> None:
        value = getattr(self, kind)
        if kind == "json_object":
            if value is not True:
                raise ValueError(f"json_object must be True, not {value!r}")
        elif kind == "json":
            self.schema()
        elif not isinstance(value, str) or not value:
            raise ValueError(f"{kind} must be a text that is not empty, not {value!r}")
        elif len(value) > LONGEST:
            raise ValueError(f"{kind} has more than {LONGEST} characters: take a simpler one")

    def schema(self) -> dict[str, Any] | bool:
        """The JSON schema, of `json` or `json_object`. Raises ValueError if it is none."""
        if self.json_object:
            return {"type": "object"}
        try:
            schema = json_module.loads(self.json) if isinstance(self.json, str) else self.json
            if len(json_module.dumps(schema)) > LONGEST:
                raise ValueError(f"it has more than {LONGEST} characters")
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"json must be a JSON schema: {error}") from error
        if not isinstance(schema, dict | bool):
            raise ValueError(f"json must be a JSON schema, an object, not {schema!r}")
        return schema
