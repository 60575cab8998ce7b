"""`folovllm inspect`: the command. Nothing of the engine is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from folovllm.apps.cli.flags import engine_flags, with_flags, writable

MOST_RECORDINGS = 6


def inspect(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A recording to replay, or up to six to race. Without one: scenes, and an engine to play with.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the page, with the recordings in it, to this one file.", callback=writable),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; by default this machine alone can look.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.", min=0, max=65535)] = 8001,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
    **given: Any,
) -> None:
    """Look into an engine: watch a scene, replay a recording, race several, or play with an engine of your own.

    With flags of the engine the page shows that engine at once; with --mine your own code runs there.
    """
    from folovllm.apps.inspector.lines import read
    from folovllm.apps.inspector.page import one_file

    recordings, chosen = list(files or ()), engine_flags(given)
    if len(recordings) > MOST_RECORDINGS:
        raise ValueError(f"a race has up to {MOST_RECORDINGS} recordings, not {len(recordings)}: leave some away")
    for file in recordings:
        read(file)
    if html is not None and not recordings:
        raise ValueError("--html writes recordings into one page: folovllm inspect run.jsonl --html run.html")
    if html is not None and html.resolve() in [file.resolve() for file in recordings]:
        raise ValueError(f"--html {html} is one of the recordings, which it would replace: name another file")
    if recordings and chosen.keys() - {"milestone"}:
        raise ValueError("a recording has its engine's configuration: leave the engine's flags away")
    if html is not None:
        one_file(recordings, html)
        return print(html)
    try:
        from folovllm.apps.inspector.serve import run
    except ModuleNotFoundError as error:
        raise ValueError(
            f'{error.name} is not installed: pip install "folovllm[serve]", or write one file with --html run.html'
        ) from error
    run(recordings, chosen, host, port, browser)


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    from folovllm.config import EngineConfig

    app.command()(with_flags(inspect, EngineConfig))
