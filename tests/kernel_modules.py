"""The modules with kernels, the core's and each elective's, by name: `python -m tests.kernel_modules` imports them without torch."""

import sys
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "folovllm"
NO_KERNELS = {"folovllm.kernels.dry_run", "folovllm.learn.numpy_triton"}


def kernel_modules() -> list[str]:
    """Dotted names of the files in `kernels/` and `hopper/` of any package. Imports nothing."""
    files = [*PACKAGE.rglob("kernels/*.py"), *PACKAGE.glob("electives/hopper/*.py")]
    names = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files if file.stem != "__init__"
    }
    return sorted(names - NO_KERNELS)


if __name__ == "__main__":
    from folovllm.kernels.compile_worker import WITHOUT, TorchStub

    sys.modules.update({name: TorchStub(name) for name in WITHOUT})
    for module in kernel_modules():
        import_module(module)
