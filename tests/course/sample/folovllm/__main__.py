"""Answers which file runs, and what it does; `--mine` as the engine's command line has it."""

import sys


def main() -> None:
    if "--mine" in sys.argv:
        from folovllm.learn import overlay as _overlay

        _overlay.install("mine")
    from folovllm import pool

    print(pool.__file__)


if __name__ == "__main__":
    main()
