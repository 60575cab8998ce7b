"""`python -m folovllm` is `folovllm`."""

from folovllm.apps.cli import main

if __name__ == "__main__":
    main()
