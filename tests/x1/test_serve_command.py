"""`folovllm serve` as it is started: with its engine in a process of its own, signals, and what is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from folovllm.apps.cli import main
from folovllm.electives.server.listener import listen
from tests.x1.background import PATIENCE, eventually, within

LONG: Any = {
    "model": "stories-5m", "prompt": "Once", "max_tokens": 3000, "stream": True, "extra_body": {"ignore_eos": True}
}  # fmt: skip


class Command:
    """A running server, from outside."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout
        line = process.stdout.readline()
        address = re.search(r"http://\S+/v1", line)
        assert address, line
        self.url = address[0]
        self.client = OpenAI(base_url=self.url, api_key="x", max_retries=0)

    def health(self) -> int:
        try:
            with urllib.request.urlopen(self.url.replace("/v1", "/health"), timeout=PATIENCE) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    own = [child for child in map(int, found.stdout.split()) if not is_gone(child)]
    return [*own, *(other for child in own for other in children(child))]


@contextmanager
def serving(*flags: str, prefix: tuple[str, ...] = ()) -> Iterator[Command]:
    engine = flags or ("--engine-process",)
    command = [*prefix, sys.executable, "-m", "folovllm", "serve", "--port", "0", "--no-use-tqdm", *engine]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        yield Command(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or nothing of it but its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")


@pytest.mark.slow
class TestEnds:
    def test_sigterm_lets_answers_end(self) -> None:
        """What runs ends as it would have; who comes meanwhile is told to go elsewhere; then exit code 0.

        A Ctrl-C that was ignored at the start stays ignored: so are a script's jobs in the background started.
        """
        with serving("--no-engine-process", prefix=("sh", "-c", "trap '' INT; exec \"$@\"", "sh")) as server:
            server.process.send_signal(signal.SIGINT)
            running = iter(server.client.completions.create(**LONG | {"max_tokens": 300}))
            count = len(next(running).choices)
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: server.health() == 503)
            assert server.process.stdout and server.process.stdout.readline().startswith("1 running: up to 30 s to end")
            with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
                server.client.completions.create(model="stories-5m", prompt="x")
            assert refused.value.status_code == 503
            chunks = list(running)
            count += sum(len(chunk.choices) for chunk in chunks)
            assert chunks[-1].choices[0].finish_reason == "length" and count > 100
            assert server.process.wait(PATIENCE) == 0

    def test_a_second_signal_does_not_wait(self) -> None:
        """And nothing is left behind, as nothing is after a kill -9: the engine sees that its parent is gone."""
        with serving() as server:
            running = iter(server.client.completions.create(**LONG))
            next(running)
            (engine,) = children(server.process.pid)
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: server.health() == 503)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM
            eventually(lambda: is_gone(engine))


SOON = 5.0  # seconds; what was seen is a few tenths


def read_until_an_error(stream: Iterator[Any], ends: list[str]) -> None:
    """Read a stream to its end; if that is an error event, its message goes to `ends`."""
    try:
        for _ in stream:
            pass
    except openai.APIError as error:
        ends.append(error.message)


@pytest.mark.slow
class TestKilled:
    """With `kill -9`, while it answers: who is left sees it, says so and ends, and nothing is left after five seconds."""

    FLAGS = ("--engine-process", "--max-model-len", "2048")
    TWO_RANKS = ("--tensor-parallel-size", "2")

    def test_the_server(self) -> None:
        with serving(*self.FLAGS, *self.TWO_RANKS) as server:
            assert next(iter(server.client.completions.create(**LONG | {"max_tokens": 2000}))).choices
            below = children(server.process.pid)
            assert len(below) >= 3, "an engine, and its ranks"
            server.process.kill()
            within(SOON, lambda: all(map(is_gone, below)))

    @pytest.mark.parametrize("flags", [(), TWO_RANKS], ids=["one rank", "two ranks"])
    def test_the_engine(self, flags: tuple[str, ...]) -> None:
        """Its ranks go, every stream ends with an error, and the server says so until it ends, by itself or at a signal."""
        with serving(*self.FLAGS, *flags) as server:
            assert server.health() == 200
            streams = [iter(server.client.completions.create(**LONG | {"max_tokens": 2000})) for _ in range(8)]
            assert all(next(stream).choices for stream in streams)
            below, ends = children(server.process.pid), list[str]()
            readers = [threading.Thread(target=read_until_an_error, args=[stream, ends]) for stream in streams]
            for reader in readers:
                reader.start()
            os.kill(below[0], signal.SIGKILL)
            within(SOON, lambda: all(map(is_gone, below)) and not any(reader.is_alive() for reader in readers))
            assert len(ends) == 8
            assert all("the engine's process ended, killed by signal 9" in message for message in ends), ends
            assert server.health() == 503
            with pytest.raises(openai.InternalServerError, match="killed by signal 9") as refused:
                server.client.completions.create(model="stories-5m", prompt="x")
            assert refused.value.status_code == 500
            if not flags:
                server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 1


def test_what_cannot_start(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 2 and a sentence, before anything is built."""

    def fails(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        assert ended.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    with listen("127.0.0.1", 0) as other:
        other.listen()
        port = str(other.getsockname()[1])
        assert f"cannot listen at 127.0.0.1:{port}" in fails("serve", "--port", port)
    assert "--host is empty" in fails("serve", "--host", "")
    assert "--host is empty" in fails("inspect", "--host", "", "--no-browser")
    assert "two models are named, a and b" in fails("serve", "a", "--model", "b")
    for named in ([str(tmp_path), "--no-engine-process"], ["--model", str(tmp_path)]):
        assert "has no config.json" in fails("serve", *named, "--port", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "without torchrun" in fails("serve")


@pytest.mark.slow
def test_a_model_that_is_not_there_in_a_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path), "--port", "0", "--engine-process"])
    assert "has no config.json" in " ".join(capsys.readouterr().err.split())
