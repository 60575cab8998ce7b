"""The command line: flags, prompts, output, errors, the chat. Most of it runs on a stand-in for `LLM`, without torch."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

from folovllm.apps.cli import main
from folovllm.apps.cli.conversation import Chat
from folovllm.apps.cli.flags import described_fields
from folovllm.config import EngineConfig
from folovllm.engine.events import Listener, StepEnded
from folovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import ScheduledSequence, SchedulerOutput, StepResult


def step_ended(step: int) -> StepEnded:
    """Seven tokens of one sequence, in 12.5 ms."""
    scheduled = ScheduledSequence(0, 0, 0, 7, np.arange(7, dtype=np.int32), (), 0, 1, None)
    result = StepResult([[1]], [[]])
    return StepEnded(step, 10.0, 10.0, 10.0125, SchedulerOutput((scheduled,)), result, waiting=0, kv_blocks_used=3)


class FakeEngine:
    """Answers every request with its words, reversed, one a step."""

    def __init__(self) -> None:
        self.words: dict[str, list[str]] = {}
        self.said: dict[str, str] = {}
        self.steps = 0
        self.aborted: list[str] = []
        self.on_step: Any = lambda: None
        self.listeners: list[Listener] = []
        self.num_threads: int | None = 1

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, stream: bool = True) -> None:
        if prompt == "too long":
            raise ValueError("the prompt is longer than the context")
        self.words[request_id] = prompt.split()[::-1]
        self.said[request_id] = ""
        self.stream = stream

    def subscribe(self, listener: Listener, experts: bool = False) -> None:
        self.listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        self.listeners.remove(listener)

    def has_unfinished_requests(self) -> bool:
        return bool(self.words)

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        outputs = []
        for request_id, words in list(self.words.items()):
            delta = words.pop(0) + " "
            self.said[request_id] += delta
            if not words:
                del self.words[request_id]
            if self.stream or not words:
                outputs.append(output(request_id, self.said[request_id], delta, finished=not words))
        self.on_step()
        return outputs

    def abort_request(self, request_id: str) -> RequestOutput:
        del self.words[request_id]
        self.aborted.append(request_id)
        return output(request_id, self.said[request_id], reason="abort")


def output(request_id: str, text: str, delta: str = "", finished: bool = True, reason: str = "stop") -> RequestOutput:
    metrics = RequestMetrics(10.0, 10.5, 12.5, num_prompt_tokens=3, num_generated_tokens=5)
    answer = CompletionOutput(0, text, [1, 2], finish_reason=reason, delta_text=delta)
    return RequestOutput(request_id, "Say [/bold]:", [7, 8], [answer], finished, metrics)


class FakeLLM:
    made: ClassVar[list[FakeLLM]] = []

    def __init__(self, **config: Any) -> None:
        self.config, self.engine = config, FakeEngine()
        FakeLLM.made.append(self)

    def generate(self, prompts: list[str], params: SamplingParams, use_tqdm: bool, on_answer: Any) -> None:
        self.prompts, self.params, self.use_tqdm = prompts, params, use_tqdm
        for i, prompt in enumerate(prompts):
            for listener in self.engine.listeners:
                listener([step_ended(i)])
            on_answer(output(str(i), f" {prompt.upper()}"))

    has_chat_template = False

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        return messages[-1]["content"]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeLLM]]:
    module = ModuleType("folovllm.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "folovllm.llm", module)
    monkeypatch.delenv("FOLOVLLM_MINE", raising=False)
    FakeLLM.made = []
    yield FakeLLM


def interrupted_after_two(step: Any) -> Any:
    """A `FakeEngine.step` during the second of which Ctrl-C is pressed."""

    def pressed(engine: FakeEngine) -> list[RequestOutput]:
        if engine.steps == 1:
            signal.raise_signal(signal.SIGINT)
        outputs: list[RequestOutput] = step(engine)
        return outputs

    return pressed


def run(*arguments: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


def type_in(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


class TestFlags:
    @pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
    def test_every_field_has_a_sentence(self, kind: type) -> None:
        assert [field.name for field, sentence in described_fields(kind) if not sentence] == []

    def test_every_field_is_a_flag(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        assert run("chat", "--help") == 0
        text = capsys.readouterr().out
        names = [field.name for kind in (EngineConfig, SamplingParams) for field, _ in described_fields(kind)]
        assert [name for name in names if f"--{name.replace('_', '-')} " not in text.replace("/", " ")] == []

    @pytest.mark.parametrize(
        ("flags", "config", "params"),
        [
            (
                "--milestone m2 --max-num-seqs 3 --temperature 0 --top-k 5 --ignore-eos --stop a --stop b --stop-token-ids 4 "
                "--no-skip-special-tokens --max-tokens 9",
                {"milestone": "m2", "max_num_seqs": 3},
                {"temperature": 0, "top_k": 5, "ignore_eos": True, "stop": ["a", "b"], "stop_token_ids": [4],
                 "skip_special_tokens": False, "max_tokens": 9},
            ),
            ("--seed 5", {"seed": 5}, {"seed": 5}),
            ("--enforce-eager --no-async-scheduling", {"enforce_eager": True, "async_scheduling": False}, {}),
        ],
        ids=["many", "seed of both", "what the preset decides"],
    )  # fmt: skip
    def test_flags_reach_engine_and_request(
        self, llm: type[FakeLLM], flags: str, config: dict[str, Any], params: dict[str, Any]
    ) -> None:
        assert run("generate", "hi", *flags.split()) == 0
        assert (llm.made[0].config, llm.made[0].params) == (config, SamplingParams(**params))

    def test_no_bar_for_one_prompt_nor_where_none_is_wanted(self, llm: type[FakeLLM]) -> None:
        for arguments in (["a", "b"], ["a"], ["a", "b", "--no-use-tqdm"]):
            run("generate", *arguments)
        assert [made.use_tqdm for made in llm.made] == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "data", "prompts"),
    [
        (["one", "two"], "", ["one", "two"]),
        (["--file", "-"], "one\ntwo\n", ["one", "two"]),
        *[(source, "naïve one\n\n two\n", ["naïve one", " two"]) for source in ([], ["--file", "FILE"])],
        # A byte order mark is no text.
        *[(source, "\ufeffcafé\nb\ufeff", ["café", "b\ufeff"]) for source in ([], ["--file", "FILE"])],
    ],
)
def test_prompts_come_from_arguments_a_file_or_stdin(
    llm: type[FakeLLM], arguments: list[str], data: str, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    file = tmp_path / "prompts.txt"
    file.write_bytes(data.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data.encode()), encoding="utf-8"))
    assert run("generate", *(str(file) if word == "FILE" else word for word in arguments)) == 0
    assert llm.made[-1].prompts == prompts


class TestOutput:
    def test_text_on_stdout_times_on_stderr(self, llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
        run("generate", "Say [/bold]:")
        out, err = capsys.readouterr()
        assert out == "Say [/bold]: SAY [/BOLD]:\n"  # markup in a text is text
        assert err == "5 tokens · TTFT 500.0 ms · TPOT 500.0 ms · 2.0 tokens/s · 1 thread\n"

    def test_one_answer_grows_on_a_terminal(
        self, llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The prompt in bold, then a word a step; after Ctrl-C what was said stays. Several answers come one by one, whole."""
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert run("generate", "one two three") == 0
        assert (
            capsys.readouterr().out == "\x1b[1mone two three\x1b[0mthree two one \n" and llm.made[-1].engine.steps == 3
        )
        monkeypatch.setattr(FakeEngine, "step", interrupted_after_two(FakeEngine.step))
        assert run("generate", "one two three") == 130
        out, err = capsys.readouterr()
        assert out.endswith("three two \n") and "interrupted: 0 of 1" in err and llm.made[-1].engine.aborted == ["0"]
        run("generate", "one", "two")
        assert capsys.readouterr().out == "\x1b[1mone\x1b[0m ONE\n\x1b[1mtwo\x1b[0m TWO\n"

    def test_json_is_one_object_a_line(self, llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
        run("generate", "one", "zwölf", "--json")
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["outputs"][0]["text"] for line in lines] == [" ONE", " ZWÖLF"]
        assert lines[0]["outputs"][0]["finish_reason"] == "stop" and "delta_text" not in lines[0]["outputs"][0]
        assert lines[0]["metrics"] == {
            "ttft": 0.5, "tpot": 0.5, "latency": 2.5, "tokens_per_second": 2.0, "num_prompt_tokens": 3, "num_generated_tokens": 5
        }  # fmt: skip

    def test_show_steps_prints_a_line_a_step(self, llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
        run("generate", "a", "b", "--show-steps", "--json")
        out, err = capsys.readouterr()
        steps = [" ".join(line.split()) for line in err.splitlines()]
        assert steps == [f"step {i} waiting 0 running 1 tokens 7 12.50 ms KV blocks 3" for i in range(2)]
        assert [json.loads(line)["outputs"][0]["text"] for line in out.splitlines()] == [" A", " B"]
        assert not llm.made[-1].use_tqdm and not llm.made[-1].engine.listeners

    def test_ctrl_c_keeps_what_was_answered(
        self, llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(self: FakeLLM, prompts: list[str], params: Any, use_tqdm: bool, on_answer: Any) -> None:
            on_answer(output("0", " A"))
            assert "a A" in capsys.readouterr().out, "printed as soon as it is there"
            raise KeyboardInterrupt

        monkeypatch.setattr(FakeLLM, "generate", interrupted)
        assert run("generate", "a", "b", "c") == 130
        out, err = capsys.readouterr()
        assert out == "" and "interrupted: 1 of 3 prompts are answered" in err


class TestEncodings:
    """Whatever the terminal's encoding is, and whatever is in a file."""

    def printed(self, monkeypatch: pytest.MonkeyPatch, *command: str) -> bytes:
        """What a command prints where there is nothing but ASCII."""
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
            assert run(*command) == 0
        return out.buffer.getvalue()

    def test_what_the_output_cannot_have(self, llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
        """It is escaped; and JSON stays JSON."""
        assert self.printed(monkeypatch, "generate", "café", "☕") == b"caf\\xe9 CAF\\xc9\n\\u2615 \\u2615\n"
        assert json.loads(self.printed(monkeypatch, "generate", "café", "--json"))["prompt"] == "café"
        type_in("crème brûlée\n", monkeypatch)
        assert self.printed(monkeypatch, "chat") == b"br\\xfbl\\xe9e cr\\xe8me \n"

    @pytest.mark.parametrize("module", ["folovllm", "milestones"])
    def test_help(self, module: str) -> None:
        command = [sys.executable, "-m", module, "--help"]
        ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "FOLOVLLM_LANG": "zh"}
        done = subprocess.run(command, capture_output=True, env=ascii_only, cwd=Path(__file__).parents[2])
        assert done.returncode == 0 and b"Usage" in done.stdout, done.stderr

    def test_other_files_with_a_mark(self, tmp_path: Path) -> None:
        from folovllm.apps.bench.workload import load_workload
        from folovllm.electives.quantization.quantizer.calibration import read_texts

        file = tmp_path / "lines.jsonl"
        file.write_text('\ufeff{"text": "a", "prompt_len": 3, "output_len": 6}\n', encoding="utf-8")
        assert read_texts(file) == ["a"] and len(load_workload(str(file)).requests) == 1


class TestOutputThatCannotBeWritten:
    @pytest.mark.parametrize(("stream", "says"), [("stdout", "the standard output is closed"), ("stdin", "no prompt")])
    def test_closed(
        self, llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: str, says: str
    ) -> None:  # fmt: skip
        """An input that is closed is empty."""
        monkeypatch.setattr(sys, stream, None)
        assert run("generate", *["hi"] * (stream == "stdout")) == 2 and not llm.made
        assert capsys.readouterr().err.startswith(f"error: {says}")

    @pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
    @pytest.mark.parametrize("arguments", [["generate", "hi"], ["generate", "hi", "--json"], ["--version"]])
    @pytest.mark.parametrize("buffering", [-1, 0])  # 0: `python -u`
    def test_a_full_disk(
        self, llm: type[FakeLLM], arguments: list[str], buffering: int,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        with io.TextIOWrapper(open("/dev/full", "wb", buffering), write_through=not buffering) as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert run(*arguments) == 2
        assert capsys.readouterr().err.endswith("error: cannot write the output: No space left on device\n")

    def test_a_reader_that_has_left(self, llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            monkeypatch.setattr(sys, "stdout", pipe)
            assert run("--version") == 1


RECORDINGS = Path(__file__).parents[1] / "inspector/data"
M1 = f"{RECORDINGS}/m1.jsonl"
WRITING = [["generate", "hi", "--trace"], ["generate", "hi", "--record"], ["inspect", "a", "--html"]]
WRITING += [["bench", "latency", "--save"]]


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["generate", "hi", "--top-p", "3"], "top_p must be above 0"),
            (["generate", "hi", "--temperature", "nan"], "temperature must be from 0"),
            (["generate", "hi", "--milestone", "m99"], "unknown milestone 'm99'"),
            (["generate", "hi", "--max-tokens", "0"], "max_tokens must be at least 1"),
            (["generate", "hi", "--file", __file__], "not both"),
            (["generate"], "no prompt"),
            (["generate", "hi", ""], "a prompt is empty"),
            (["generate", "hi", "--milestone", ""], "--milestone is empty"),
            (["chat", "--model", ""], "--model is empty"),
            (["bench", "latency", "--milestone", ""], "--milestone is empty"),
            (["bench", "latency", "--compare", ""], "--compare takes milestones"),
            (["bench", "ladder", "--upto", ""], "unknown milestone ''"),
            (["chat", "--server", "http://x"], "chat --server is gone"),
            *[([*command, "/proc/x"], "nothing can be written to /proc/x") for command in WRITING],
            (["generate", "hi", "--trace", "/"], "nothing can be written to /"),
            (["generate", "hi", "--trace", "x", "--record", "./x"], "is the file of another flag, too"),
            (["generate", "hi", "--record", "new.json", "--trace", "link"], "is the file of another flag, too"),
            (["inspect", M1, "--html", f"{RECORDINGS}/../data/m1.jsonl"], "is one of the recordings"),
            (["inspect", "none.jsonl"], "cannot read none.jsonl"),
            (["inspect", "--html", "x.html"], "--html writes recordings into one page"),
            (["inspect", *7 * [M1]], "a race has up to 6 recordings, not 7"),
            (["inspect", M1, "--block-size", "8"], "leave the engine's flags away"),
            (["inspect", M1, "--html", "no/x.html"], "there is no folder no"),
            (["chat", "--n", "2"], "one answer"),
            (["download", "gpt-5"], "smollm2"),
            (["generate", "hi", "--nonsense"], "--nonsense"),
        ],
    )
    def test_a_users_error_is_said_before_any_model(
        self, llm: type[FakeLLM], arguments: list[str], words: str,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    ) -> None:  # fmt: skip
        type_in("\n \n", monkeypatch)
        monkeypatch.chdir(tmp_path)
        Path("link").symlink_to("new.json")
        assert run(*arguments) == 2
        error = capsys.readouterr().err
        assert words in re.sub(r"[\s│]+", " ", error) and not llm.made
        assert error.startswith("Usage: ") or (error.startswith("error: ") and error.count("\n") == 1)

    def test_a_bug_is_not_mistaken_for_a_users_error(self, llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(self: FakeLLM, *_: Any, **__: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(FakeLLM, "generate", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            main(["generate", "hi"])


class TestChat:
    def chat(self) -> Chat:
        return Chat(FakeLLM(), SamplingParams(), system="Be brief.")  # type: ignore[arg-type]

    def test_it_streams_and_keeps_the_history(self, llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
        chat = self.chat()
        chat.answer("how are you")
        chat.answer("and now")
        assert capsys.readouterr().out == "you are how \nnow and \n"
        assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
        assert [m["content"] for m in chat.messages[3:]] == ["and now", "now and "]

    def test_reset_and_a_question_that_is_refused(
        self, llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """After a reset there is the system message alone; a refusal leaves the conversation as it was."""
        type_in("hi there\n\n/reset\n/help\nhi\ntoo long\nstill here\n/quit\nno more\n", monkeypatch)
        chat = self.chat()
        chat.run()
        out, err = capsys.readouterr()
        assert out == "there hi \nhi \nhere still \n" and "longer than the context" in err
        assert "/reset starts anew" in err
        assert [m["content"] for m in chat.messages if m["role"] != "assistant"] == ["Be brief.", "hi", "still here"]

    def test_ctrl_c_stops_the_answer_and_not_the_program(self, llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
        """In the last step it is too late to abort."""
        chat, handler = self.chat(), signal.getsignal(signal.SIGINT)
        engine = FakeLLM.made[-1].engine
        engine.on_step = lambda: engine.steps in (2, 3) and os.kill(os.getpid(), signal.SIGINT)
        assert chat.answer("one two three four") == "four three "
        assert engine.aborted == ["chat-1"] and not engine.has_unfinished_requests()
        assert chat.answer("one") == "one " and engine.aborted == ["chat-1"]
        assert chat.answer("all good") == "good all " and len(chat.messages) == 7  # the next one works
        assert signal.getsignal(signal.SIGINT) is handler

    def test_ctrl_c_at_the_prompt_leaves_the_program_running(
        self, llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        typed = iter([KeyboardInterrupt, "hi", EOFError])

        def read(_: str) -> str:
            line = next(typed)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        self.chat().run()
        out, err = capsys.readouterr()
        assert out == "hi \n" and "Ctrl-D leaves" in err

    def test_ctrl_c_without_a_terminal_leaves(self, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """There is no prompt to come back to: a pipe would be read on and on."""

        def interrupted(_: str) -> str:
            raise KeyboardInterrupt

        type_in("", monkeypatch)
        monkeypatch.setattr("builtins.input", interrupted)
        assert run("chat") == 130


class TestMine:
    """`--mine` in a process of its own: it must act before anything else is imported."""

    SHOW = """
import sys
from folovllm.apps.cli import main
for arguments in {commands}:
    try:
        main(arguments)
    except SystemExit as end:
        print("exit code", end.code, file=sys.stderr, flush=True)
print(sys.modules["folovllm.outputs"].__file__)
"""

    @pytest.fixture
    def workplace(self, tmp_path: Path) -> Path:
        """A learner's `LLM` that raises what the model is called, or else shows its configuration."""
        package = tmp_path / "mine" / "folovllm"
        package.mkdir(parents=True)
        (package / "llm.py").write_text(
            "import json\nimport folovllm.outputs\nclass LLM:\n"
            "    def __init__(self, **config): raise eval(config.get('model', 'ValueError(\"mine \" + json.dumps(config))'))\n"
        )
        (package / "outputs.py").write_text("")
        return tmp_path

    def python(self, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "FOLOVLLM_MINE"}
        return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)

    def errors(self, folder: Path, *commands: list[str]) -> list[str]:
        """What each command writes to stderr before it ends with exit code 2; all of them run the learner's files."""
        done = self.python(folder, self.SHOW.format(commands=commands))
        assert done.stdout.strip() == str(folder / "mine" / "folovllm" / "outputs.py"), done.stderr
        *errors, rest = done.stderr.split("exit code 2\n")
        assert len(errors) == len(commands) and not rest, done.stderr
        return errors

    def test_the_learners_files_are_run(self, workplace: Path) -> None:
        """Where the flag stands does not matter, and the traceback shows where one's own code raised."""
        (error,) = self.errors(workplace, ["generate", "hi", "--mine"])
        assert "error: mine {}" in error and "mine/folovllm/llm.py" in error

    def test_the_preset_and_what_is_not_written_yet(self, workplace: Path) -> None:
        """The preset is that of the highest milestone that was started; what is not written yet is one line."""
        (workplace / "mine" / ".course.json").write_text('{"started": ["m2", "m1"]}')
        missing = [
            "NotImplementedError('m2.2: f')",
            "RuntimeError('rank 1 failed with NotImplementedError: m2.2: f' + 2 * chr(10) + 'Traceback of the rank')",
        ]
        start = ["--mine", "generate", "hi"]
        preset, asked, *unwritten = self.errors(
            workplace, start, [*start, "--milestone", "m1"], *([*start, "--model", error] for error in missing)
        )
        assert 'mine {"milestone": "m2"}' in preset and 'mine {"milestone": "m1"}' in asked
        for error in unwritten:
            assert "not written yet: m2.2: f. " in error and "Traceback" not in error

    def test_without_mine_it_says_how_to_start(self, tmp_path: Path) -> None:
        code = "import folovllm.learn.overlay as o; o.__file__ = '/x/y/z'\nfrom folovllm.apps.cli import main; main(['--mine'])"
        done = self.python(tmp_path, code)
        assert done.returncode == 2 and "milestones start m1" in done.stderr


class TestTheProgram:
    def test_the_embedded_model_tells_a_story_and_continues_raw_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--milestone", "m1", "--temperature", "0"]  # in tests/m1, so no later milestone's code
        assert run("generate", "Tell me a story about Lily and a red kite.", "--max-tokens", "40", *flags) == 0
        story = capsys.readouterr().out
        assert story.count("Lily") > 1 and "red kite" in story.split("\n", 1)[1]
        assert run("generate", "Once upon a time,", "--raw", *flags, "--max-tokens", "8", "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["prompt"] == "Once upon a time," and "<|im_start|>" not in answer["outputs"][0]["text"]
        assert len(answer["prompt_token_ids"]) < 8

    @pytest.mark.parametrize(
        "milestone", [pytest.param(id, marks=getattr(pytest.mark, id)) for id in ("m1", "m2", "m3")]
    )
    def test_from_a_prompt_to_a_text_with_a_real_engine(
        self, milestone: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tests.helpers import tiny_checkpoint

        model = str(tiny_checkpoint())
        flags = ["--model", model, "--milestone", milestone, "--temperature", "0", "--max-tokens", "4", "--json"]
        assert run("generate", "Hello", "you", *flags, "--show-steps") == 0
        out, err = capsys.readouterr()
        answers = [json.loads(line) for line in out.splitlines()]
        assert [(a["prompt"], len(a["outputs"][0]["token_ids"])) for a in answers] == [("Hello", 4), ("you", 4)]
        assert sum("step " in line and "waiting" in line for line in err.splitlines()) == (
            8 if milestone == "m1" else 4
        )
        type_in("Hello\n", monkeypatch)
        assert run("chat", "--model", model, "--milestone", milestone, "--max-tokens", "3") == 0
