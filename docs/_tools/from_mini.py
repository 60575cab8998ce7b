"""From mini to vLLM: the table of `docs/data/vllm.toml`, and a check of what it names.

python docs/_tools/from_mini.py VLLM      VLLM: the folder `vllm` of vLLM's release 0.26.0. Says what is not there, here, in mini or in vLLM.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / "milestones/mini/reference"
Row = dict[str, str]


def rows() -> list[Row]:
    """The symbols, in the order of the file."""
    found: list[Row] = tomllib.loads((ROOT / "docs/data/vllm.toml").read_text("utf-8"))["symbol"]
    return found


def place(name: str) -> tuple[str, str]:
    """File and symbol of ours: "cache/block_manager.py" and "BlockManager.slots"."""
    module, _, symbol = name.partition(":")
    return f"{module.replace('.', '/')}.py", symbol


def table() -> str:
    """The page's table."""
    lines = ["| idea | here | mini | vLLM 0.26 | what vLLM does beside it |", "|---|---|---|---|---|"]
    for row in rows():
        (file, ours), (theirs, symbol) = place(row["ours"]), row["vllm"].split(":")
        mini = "`{1}`<br>{0}".format(*row["mini"].split(":")) if row["mini"] else "-"
        more = row["more"] + (f" {row['also']}" if "also" in row else "")
        lines.append(f"| {row['idea']} | `{ours}`<br>{file} | {mini} | `{symbol}`<br>{theirs} | {more} |")
    return "\n".join(lines)


def names(file: Path) -> set[str]:
    """Functions, classes and their methods in a file; none where it is missing."""
    if not file.is_file():
        return set()
    found = {}
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            methods = node.body if isinstance(node, ast.ClassDef) else []
            found[node.name] = node
            found |= {f"{node.name}.{each.name}": each for each in methods if isinstance(each, ast.FunctionDef)}
    return set(found)


def missing(vllm: Path | None) -> list[str]:
    """What the file names and is not there; without `vllm`, here and in mini alone."""
    found = []
    for row in rows():
        places = [(ROOT / "folovllm", *place(row["ours"]))]
        places += [(MINI, *row["mini"].split(":"))] if row["mini"] else []
        places += [(vllm, *row["vllm"].split(":"))] if vllm else []
        found += [
            f"{row['idea']}: {file} has no {name}" for root, file, name in places if name not in names(root / file)
        ]
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit("\n".join(missing(Path(sys.argv[1]))) or None)
