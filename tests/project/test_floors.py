"""Which part of the engine may import which: imports run one way, and a layer is born what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "folovllm"
# Who uses the engine stands above it, and only `build` imports all layers. All other files of the package's own folder
# are the lowest layer, with `step` and `distributed`: records and small tools that every layer may import.
ABOVE = [
    "__init__",
    "__main__",
    "beam_search",
    "build",
    "build_batch",
    "build_packed",
    "chat_template",
    "compat",
    "llm",
    "llm_calls",
]
LOWEST = (
    *sorted({file.stem for file in PACKAGE.glob("*.py")} - {*ABOVE}), "builders", "distributed", "step",
    "sample.sampling_row",  # the host's half of a row's state, beside the device's
)  # fmt: skip
LAYERS = {  # layers of imports: each may import itself, the lowest layer, and these
    "cache": (),  # whose block is whose: numbers, and no tensor
    "kernels": (),
    "sample": ("kernels",),
    "attention": ("kernels",),
    "layers": ("attention", "kernels"),
    "models": ("layers", "attention", "kernels"),
    "worker": ("sample", "models", "layers", "attention", "kernels"),
    "executor": ("worker",),  # `make_rank` comes to a rank by its name
    "engine": ("executor", "cache", "models", "attention"),
}
ELECTIVES = {"server": "X1", "structured_output": "X1", "quantization": "X2", "spec_decode": "X3", "moe": "X4", "hybrid": "X5",
             "rollouts": "X6", "hopper": "hopper"}  # fmt: skip
BESIDE = ("bench", "cli", "inspector")  # they use the engine, and all of it
EXCEPTIONS = {
    "engine/llm_engine.py": ("build",),  # an engine that is made from a configuration puts itself together
    "engine/extension.py": (
        "layers.layer_set",
        "worker.graph_runner",
        "worker.model_runner",
    ),  # types of what hooks return
    "request.py": ("engine.detokenizer",),  # the type of a field, which others fill and read
    "setup.py": (
        "attention.backends.abstract",
        "attention.backends.registry",
        "models.registry",
        "models.files",
    ),  # what decides
}


@cache
def parts(file: Path) -> list[ast.AST]:
    """All nodes of its syntax tree."""
    return list(ast.walk(ast.parse(file.read_text())))


def imported(file: Path) -> Iterator[str]:
    """The modules of this package that a file imports, anywhere in it, without `folovllm.`."""
    for node in parts(file):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            whole = node.module == "folovllm"
            names += [f"folovllm.{alias.name}" for alias in node.names] if whole else [f"{node.module}"]
        yield from (name.removeprefix("folovllm.") for name in names if name.startswith("folovllm."))


def wrong_imports(files: list[Path], known: tuple[str, ...]) -> list[str]:
    """What these files import beyond the `known` places, as "file: module"."""
    assert files
    found = [(str(file.relative_to(PACKAGE)), module) for file in files for module in imported(file)]
    known = (*known, *ELECTIVES)  # `test_no_arrow_leads_into_an_elective` looks at these
    return [f"{name}: {module}" for name, module in found if not is_in(module, (*known, *EXCEPTIONS.get(name, ())))]


def is_in(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_those_below(layer: str) -> None:
    below = (layer, *LAYERS[layer], *LOWEST)
    wrong = wrong_imports(sorted((PACKAGE / layer).rglob("*.py")), below)
    assert not wrong, f"{layer} stands on {', '.join(below)}: {wrong}"


@pytest.mark.parametrize("place", LOWEST)
def test_the_lowest_layer_imports_itself_alone(place: str) -> None:
    folder = PACKAGE / place.replace(".", "/")
    wrong = wrong_imports(sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")], LOWEST)
    assert not wrong, f"{place} is of the lowest layer, and imports {wrong}"


def test_every_folder_has_its_layer() -> None:
    folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert folders == {*LAYERS, *ELECTIVES, *BESIDE, "builders", "distributed", "step"}


def test_no_arrow_leads_into_an_elective() -> None:
    """The core knows no elective, and no elective knows another."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        name = str(file.relative_to(PACKAGE))
        own = ELECTIVES.get(name.split("/")[0])
        for module in imported(file):
            elective = ELECTIVES.get(module.split(".")[0])
            if elective and elective != own and name.split("/")[0] not in BESIDE:
                found.append(f"{name}: {module}")
    assert not found, "what is new needs a hook"


def test_events_know_only_what_a_step_is() -> None:
    assert {*imported(PACKAGE / "events.py")} == {"step.schedule"}
    assert {*imported(PACKAGE / "step" / "schedule.py")} == {"step.bitmasks"}


def test_nothing_becomes_something_else_afterwards() -> None:
    """No object changes its class, and no layer's `forward` is replaced."""
    for file in PACKAGE.rglob("*.py"):
        for node in parts(file):
            targets = node.targets if isinstance(node, ast.Assign) else []
            changed = [t.attr for t in targets if isinstance(t, ast.Attribute) and t.attr in ("__class__", "forward")]
            assert not changed, f"{file}:{node.lineno} assigns {changed}"  # type: ignore[attr-defined]
