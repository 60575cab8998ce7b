"""The starts of the program, for `test_starts.py`: `python -m tests.api.starts NAME...` shows which packages are there after each."""

import contextlib
import io
import sys

HEAVY = ("numpy", "pandas", "sympy", "torch", "torch._dynamo", "transformers", "triton")


def package() -> None:
    import folovllm  # noqa: F401


def parameters() -> None:
    from folovllm import EngineConfig, SamplingParams  # noqa: F401


def commands() -> None:
    from folovllm.apps.cli import main

    helps = (["--help"], ["generate", "--help"], ["bench", "--help"])
    for arguments in (*helps, ["generate", "x", "--top-p", "3"], ["--version"]):
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            main(arguments)


def text() -> None:
    from folovllm import LLM, SamplingParams

    llm = LLM(milestone="m1", model_impl="native")
    (output,) = llm.generate("Lily", SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        print(name, *(package for package in HEAVY if package in sys.modules))
