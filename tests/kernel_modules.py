"""The modules with kernels, the core's and each elective's, by name. Imports nothing, so that a process without torch may ask."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "folovllm"
NONE_OF_TRITON = "folovllm.kernels.dry_run"


def kernel_modules() -> list[str]:
    """Dotted names of the files in `kernels/` and `hopper/` of any package."""
    files = [*PACKAGE.rglob("kernels/*.py"), *PACKAGE.glob("hopper/*.py")]
    names = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files if file.stem != "__init__"
    ]
    return sorted(name for name in names if name != NONE_OF_TRITON)
