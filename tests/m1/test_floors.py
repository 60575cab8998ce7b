"""Which part of the engine may know which: imports run one way, and a layer is born what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "folovllm"
GROUND = ("config", "forward_batch", "model_config", "distributed.group", "distributed.sharding")
FLOORS = ("kernels", "attention", "layers", "models")  # each may import itself and what stands before it
OWN = {"attention": ("cache.growing_cache",)}  # two tensors that only one backend has


def imported(file: Path) -> Iterator[str]:
    """The modules of this package that a file imports, anywhere in it, without `folovllm.`."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [f"{node.module}"] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        yield from (name.removeprefix("folovllm.") for name in names if name.startswith("folovllm."))


def is_in(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_knows_only_those_below(floor: str) -> None:
    below = (*GROUND, *FLOORS[: FLOORS.index(floor) + 1], *OWN.get(floor, ()))
    files = sorted((PACKAGE / floor).rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(PACKAGE)}: {module}"
        for file in files
        for module in imported(file)
        if not is_in(module, below)
    ]
    assert not wrong, f"{floor} stands on {', '.join(below)}: {wrong}"


@pytest.mark.parametrize("module", GROUND)
def test_the_ground_floor_knows_itself_alone(module: str) -> None:
    file = (PACKAGE / module.replace(".", "/")).with_suffix(".py")
    wrong = [name for name in imported(file) if not is_in(name, (*GROUND, "flags", "vllm_arguments"))]
    assert not wrong, f"{module} is ground floor, and imports {wrong}"


def test_nothing_becomes_something_else_afterwards() -> None:
    """No object changes its class, and no layer's `forward` is replaced."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            changed = [t.attr for t in targets if isinstance(t, ast.Attribute) and t.attr in ("__class__", "forward")]
            assert not changed, f"{file}:{node.lineno} assigns {changed}"  # type: ignore[attr-defined]
