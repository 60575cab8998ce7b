"""Which part of the engine may import which: imports run one way, and a layer is born what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "folovllm"
# Who uses the engine stands above it, and only `build` imports all layers. All other files of the package's own folder
# are the lowest layer, with `step` and `distributed`: records and small tools that every layer may import.
ABOVE = [
    "__init__",
    "__main__",
    "beam_search",
    "build",
    "compat",
    "llm",
    "structured_outputs",  # this and beam_search are old paths
]
# Records and tools of the other folders that every layer may import, too.
RECORDS = (
    "engine.event_stream",
    "engine.events",
    "engine.inputs",
    "engine.prompt_forms",
    "engine.require",
    "engine.setup",
    "engine.spelling",
    "engine.vllm_arguments",
    "models.model_config",
    "models.written_files",
    "sample.sampling_row",
    "sample.sampling_rules",
)
LOWEST = (
    *sorted({file.stem for file in PACKAGE.glob("*.py")} - {*ABOVE}),
    "distributed",
    "step",
    *RECORDS,
    "learn.builders",  # where a learner's own parts come in
)  # where a learner's own parts come in
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
ELECTIVES = {
    f"electives.{package}": owner
    for package, owner in {
        "server": "X1", "structured_output": "X1", "quantization": "X2", "spec_decode": "X3", "moe": "X4", "hybrid": "X5",
        "rollouts": "X6", "kv_transfer": "X7", "hopper": "hopper",
    }.items()
}  # fmt: skip
BESIDE = ("apps", "learn")  # they use the engine, and all of it
EXCEPTIONS = {
    "kernels/__init__.py": ("learn.numpy_triton",),  # where Triton is missing
    "engine/llm_engine.py": ("build",),  # an engine that is made from a configuration puts itself together
    "engine/build_batch.py": (*LAYERS,),  # what `build` is for M1, these are for M2 to M5 and for M6
    "engine/build_packed.py": (*LAYERS,),
    "engine/calls.py": ("worker.model_runner",),  # the name of what each rank is asked for
    "engine/extension.py": (
        "layers.layer_set",
        "worker.graph_runner",
        "worker.model_runner",
    ),  # types of what hooks return
    "request.py": ("engine.detokenizer",),  # the type of a field, which others fill and read
    "engine/setup.py": (
        "attention.backends.abstract",
        "attention.backends.registry",
        "models.registry",
        "models.files",
    ),  # what decides
}


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def owner_of(module: str) -> str | None:
    """The elective that a module belongs to, if to any."""
    return next((owner for package, owner in ELECTIVES.items() if is_in(module, (package,))), None)


@cache
def parts(file: Path) -> list[ast.AST]:
    """All nodes of its syntax tree."""
    return list(ast.walk(ast.parse(file.read_text())))


def imported(file: Path) -> Iterator[str]:
    """The modules of this package that a file imports, anywhere in it, without `folovllm.`."""
    for node in parts(file):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            package = ROOT.joinpath(
                *f"{node.module}".split(".")
            )  # what a package gives is a module, or the package's own
            modules = {file.stem for file in package.iterdir()} if package.is_dir() else set()
            names += [
                f"{node.module}.{alias.name}" if alias.name in modules else f"{node.module}" for alias in node.names
            ]
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
    files = [file for file in sorted((PACKAGE / layer).rglob("*.py")) if not is_in(module_of(file), RECORDS)]
    wrong = wrong_imports(files, below)
    assert not wrong, f"{layer} stands on {', '.join(below)}: {wrong}"


@pytest.mark.parametrize("place", LOWEST)
def test_the_lowest_layer_imports_itself_alone(place: str) -> None:
    folder = PACKAGE / place.replace(".", "/")
    wrong = wrong_imports(sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")], LOWEST)
    assert not wrong, f"{place} is of the lowest layer, and imports {wrong}"


def test_every_folder_has_its_layer() -> None:
    folders = {
        module_of(file.parent) for file in (*PACKAGE.glob("*/__init__.py"), *PACKAGE.glob("electives/*/__init__.py"))
    }
    assert folders == {*LAYERS, *ELECTIVES, *BESIDE, "electives", "distributed", "step"}


def test_no_arrow_leads_into_an_elective() -> None:
    """The core knows no elective, and no elective knows another."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        name = module_of(file)
        if is_in(name, BESIDE):
            continue
        owners = {module: owner_of(module) for module in imported(file)}
        found += [f"{name}: {module}" for module, owner in owners.items() if owner not in (None, owner_of(name))]
    assert not found, "what is new needs a hook"


def test_events_know_only_what_a_step_is() -> None:
    assert {*imported(PACKAGE / "engine/events.py")} == {"step.schedule"}
    assert {*imported(PACKAGE / "step" / "schedule.py")} == {"step.scores"}


def test_nothing_becomes_something_else_afterwards() -> None:
    """No object changes its class, and no layer's `forward` is replaced."""
    for file in PACKAGE.rglob("*.py"):
        for node in parts(file):
            targets = node.targets if isinstance(node, ast.Assign) else []
            changed = [t.attr for t in targets if isinstance(t, ast.Attribute) and t.attr in ("__class__", "forward")]
            assert not changed, f"{file}:{node.lineno} assigns {changed}"  # type: ignore[attr-defined]
