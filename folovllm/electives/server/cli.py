"""`folovllm serve`: the command. Nothing of the engine is imported before it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from folovllm.apps.cli.flags import engine_flags, pick, with_flags


def serve(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="model",
            help="A folder, a GGUF file, a hub id, or a model's short name (stories-5m, smollm2), as --model has it.",
            show_default=False,
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Offer a model through OpenAI's API.

    It listens at http://127.0.0.1:8000, and a browser finds a page to chat there.
    If no model is named, the small one that comes with the package answers.
    """
    from folovllm.config import EngineConfig
    from folovllm.electives.server.config import ServerConfig

    config = ServerConfig(**pick(flags, ServerConfig))
    if name and flags["model"]:
        raise ValueError(f"two models are named, {name} and {flags['model']}: a server has one")
    chosen = EngineConfig(**engine_flags(flags | {"model": name or flags["model"]}))
    try:
        from folovllm.electives.server.serve import run_server
    except ModuleNotFoundError as error:
        raise ValueError(
            f'{error.name} is not installed: pip install "folovllm[serve]" brings what a server needs'
        ) from error
    if code := run_server(config, chosen):
        raise typer.Exit(code)


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    from folovllm.config import EngineConfig
    from folovllm.electives.server.config import ServerConfig

    app.command()(with_flags(serve, ServerConfig, EngineConfig))
