"""The modules with kernels, the core's and each elective's, by name."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "folovllm"
NO_KERNELS = {"folovllm.kernels.dry_run", "folovllm.learn.numpy_triton"}


def kernel_modules() -> list[str]:
    """Dotted names of the files in `kernels/` and `hopper/` of any package. Imports nothing."""
    files = [*PACKAGE.rglob("kernels/*.py"), *PACKAGE.glob("electives/hopper/*.py")]
    names = {".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts) for f in files if f.stem != "__init__"}
    return sorted(names - NO_KERNELS)
