"""`folovllm quantize`: the command. Nothing of the engine is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from folovllm.apps.cli.flags import pick, with_flags
from folovllm.electives.quantization.quantizer.options import QuantizeOptions
from folovllm.engine.require import require

if TYPE_CHECKING:
    from folovllm.electives.quantization.quantizer.run import Report


MODEL = typer.Argument(help="A folder, a hub id or an embedded model's name.", show_default=False)
OUT = typer.Option("--out", "-o", help="The folder to write.", metavar="DIR", show_default=False)
TEXT = typer.Option(
    help='JSON lines, each {"text": "..."}: gptq and awq learn from the first four fifths what inputs look like; '
    "the last fifth measures the perplexity. The embedded model has a text of its own.",
    metavar="FILE",
)
DEVICE = typer.Option(help="cuda or cpu; by default cuda where there is one.")


def quantize(
    model: Annotated[str | None, MODEL] = None,
    out: Annotated[Path | None, OUT] = None,
    calibration: Annotated[Path | None, TEXT] = None,
    device: Annotated[str | None, DEVICE] = None,
    **given: Any,
) -> None:
    """Write a model with fewer bits, for this engine, vLLM and transformers.

    It takes a decoder layer at a time: memory holds one layer, and the text's
    hidden states. At the end it prints perplexity and size, before and after.

    gptq and awq have 4 bits a weight, fp8 and int8 have 8. Embedding and head stay as they are.
    """
    if out is None:
        raise ValueError("name the folder to write: -o DIR")
    chosen = pick(given, QuantizeOptions)
    require("format" in chosen, "choose a format: --format gptq, awq, fp8 or int8")
    options = QuantizeOptions(**chosen)  # before torch is loaded
    from folovllm.config import DEFAULT_MODEL
    from folovllm.electives.quantization.quantizer.run import quantize as run

    show(run(model or DEFAULT_MODEL, options, out, calibration, device))


def show(report: Report) -> None:
    """Print what came out: a table of two rows, and where the folder is."""
    from rich.console import Console
    from rich.table import Table

    table, says = Table("", "before", "after"), "no text, so no perplexity: --calibration names one"
    table.add_row("size, MB", f"{report.bytes_before / 1e6:.1f}", f"{report.bytes_after / 1e6:.1f}")
    if (quality := report.quality) is not None:
        table.add_row("perplexity", f"{quality.before:.4f}", f"{quality.after:.4f}")
        says = (
            f"perplexity is over {quality.tokens} tokens, from the last fifth of the text; the likeliest token is the same "
            f"at {quality.agreement:.1%} of them"
        )
    Console().print(table)
    print(says, report.folder, sep="\n")


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(with_flags(quantize, QuantizeOptions))
