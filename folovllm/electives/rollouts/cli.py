"""`folovllm rl`: the command. Nothing of the engine is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from folovllm.apps.cli.flags import pick, with_flags, writable
from folovllm.electives.rollouts.demo_options import Options


def demo(
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the curve to this JSON file.", callback=writable)
    ] = None,
    **given: Any,
) -> None:
    """Teach the embedded model to name its kite's colour.

    It rolls out, learns from what came (GRPO), and gives the new weights back to the engine, on a CPU. Ctrl-C ends it early.
    """
    from folovllm.electives.rollouts.demo import run_demo

    run_demo(Options(**pick(given, Options)), save)


def add_to(app: typer.Typer) -> None:
    """Add the commands to `app`, as `rl ...`."""
    rl = typer.Typer(no_args_is_help=True, help="Reinforcement learning over the engine's rollouts.")
    rl.callback()(lambda: None)  # so that `demo` stays a word of the command
    rl.command()(with_flags(demo, Options))
    app.add_typer(rl, name="rl")
