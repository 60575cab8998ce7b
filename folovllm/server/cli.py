"""`folovllm serve`: the command. Nothing of the engine is imported before it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def serve(
    model: Annotated[
        str | None, typer.Argument(help="A folder, a hub id or an embedded model's name.", show_default=False)
    ] = None,
    **given: Any,
) -> None:
    """Offer a model through OpenAI's API."""
    from folovllm.cli import engine_flags
    from folovllm.config import EngineConfig
    from folovllm.flags import pick
    from folovllm.server.config import ServerConfig

    config = ServerConfig(**pick(given, ServerConfig))
    chosen = EngineConfig(**engine_flags(given | {"model": model}))
    try:
        from folovllm.server.serve import run_server
    except ModuleNotFoundError as error:
        raise ValueError(
            f'{error.name} is not installed: pip install "folovllm[serve]" brings what a server needs'
        ) from error
    if code := run_server(config, chosen):
        raise typer.Exit(code)
