"""Write the texts that speculation is measured with: `python -m tools.speculation_sets`, into tools/speculation/.

`repetitive.json`: edits of code, quotations from a text, lists of records in JSON. `plain.json`: stories, in which little
comes twice. The forms of the answers are given as regular expressions and schemas, so that any model writes such texts, the
embedded one of 5.8 million parameters too; within its form an answer is the model's own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

from tools.train_tiny.stories import request_and_story

FOLDER = Path(__file__).parent / "speculation"
NAMES = ("count", "total", "price", "width", "height", "weight", "index", "score")
Task = dict[str, Any]


def code_edit(rng: Random) -> Task:
    """A short program of which a name is to be changed: every line may stay, or have the new name."""
    old, new, *others = rng.sample(NAMES, 5)
    lines = [f"def update(record, {old}):"]
    for other in others:
        lines += [f"    if record.{other} is None:", f"        record.{other} = {old} + {rng.randint(1, 9)}"]
    lines += [f"    record.{old} = {old}", f"    return record.{others[0]} + {old}"]
    edited = [re.sub(rf"\b{old}\b", new, line) for line in lines]
    both = [sorted({re.escape(a), re.escape(b)}) for a, b in zip(lines, edited, strict=True)]
    question = f"Rename {old} to {new} and write the whole program again.\n" + "\n".join(lines)
    return task("edit", question, 220, regex="\\n".join(f"({'|'.join(line)})" for line in both))


def quotations(rng: Random) -> Task:
    """A story of which four sentences are to be quoted."""
    _, story, _ = request_and_story(rng)
    sentences = [s for s in re.split(r"(?<=[.?!]) ", story.replace('"', "'")) if 30 < len(s) < 120]
    quotes = f'- "({"|".join(map(re.escape, sentences))})"'
    question = "Quote the four most important sentences of this story.\n" + " ".join(sentences)
    return task("quotes", question, 160, regex="\\n".join([quotes] * 4))


def records(rng: Random) -> Task:
    """A list of six records, whose keys are the same again and again."""
    fields = {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "favorite_animal": {"enum": ["dog", "cat", "fox", "owl"]},
        "favorite_color": {"enum": ["red", "blue", "green"]},
        "is_friendly": {"type": "boolean"},
        "number_of_friends": {"type": "integer", "minimum": 0, "maximum": 9},
    }
    chosen = {name: fields[name] for name in rng.sample(sorted(fields), 4)}
    record = {"type": "object", "properties": chosen, "required": [*chosen], "additionalProperties": False}
    schema = {"type": "array", "items": record, "minItems": 6, "maxItems": 6}
    question = "Tell me about six children. Answer in JSON, each with " + ", ".join(chosen) + "."
    return task("json", question, 240, json=schema)


def story(rng: Random) -> Task:
    """A wish for a story."""
    return task("story", request_and_story(rng)[0], 160)


def task(kind: str, question: str, max_tokens: int, **form: Any) -> Task:
    """One request: a chat of one turn, and the form of its answer if it has one."""
    return {
        "kind": kind, "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "form": form,
    }  # fmt: skip


def main() -> None:
    """Write both files."""
    FOLDER.mkdir(exist_ok=True)
    repetitive = [make(Random(100 * i)) for make in (code_edit, quotations, records) for i in range(4)]
    plain = [story(Random(7 + i)) for i in range(8)]
    for name, tasks in (("repetitive", repetitive), ("plain", plain)):
        (FOLDER / f"{name}.json").write_text(json.dumps(tasks, indent=1) + "\n")


if __name__ == "__main__":
    main()
