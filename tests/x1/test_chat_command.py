"""`folovllm chat --server`: the loop is that of `chat`, the answers are a server's."""

from __future__ import annotations

import io
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from folovllm.cli import main
from folovllm.cli.conversation import Chat
from folovllm.cli.remote import Server, ServerError
from folovllm.llm import LLM
from folovllm.sampling_params import SamplingParams
from folovllm.server.config import ServerConfig
from folovllm.server.listener import listen
from tests.x1.background import PATIENCE, Background, eventually, served

LONG = {"max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Background]:
    config = ServerConfig(api_key=["a-key"], served_model_name=["little", "stories"])
    yield from served(config, max_num_seqs=1, max_model_len=4096)


def run(*arguments: str) -> int:
    """The exit code of `folovllm chat`."""
    with pytest.raises(SystemExit) as ended:
        main(["chat", *arguments])
    return int(ended.value.code or 0)


class TestCommand:
    def test_a_conversation(
        self, server: Background, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The same answers as from an engine of one's own; a question that is too long leaves the conversation as it was."""
        questions = ["Tell me about Lily.", "And then?"]
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([questions[0], "word " * 5000, questions[1]])))
        flags = ("--server", server.url, "--api-key", "a-key", "--temperature", "0", "--max-tokens", "20")
        assert run(*flags, "--system", "Be brief.") == 0
        said, complaint = capsys.readouterr()
        messages = [{"role": "system", "content": "Be brief."}]
        with LLM(max_model_len=4096, use_tqdm=False) as llm:
            for question in questions:
                messages.append({"role": "user", "content": question})
                (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
                messages.append({"role": "assistant", "content": output.outputs[0].text})
        assert said == "".join(message["content"] + "\n" for message in messages if message["role"] == "assistant")
        assert "leaves no room" in complaint and "/reset starts a new conversation" in " ".join(complaint.split())

    def test_a_key(
        self, server: Background, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
        assert run("--server", server.url) == 2
        assert "wants a key that it knows" in " ".join(capsys.readouterr().err.split())
        monkeypatch.setenv("FOLOVLLM_API_KEY", "a-key,another")
        assert run("--server", f"{server.url}/v1/", "--max-tokens", "3", "--model", "stories") == 0
        assert capsys.readouterr().out.strip()
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
        assert run("--server", server.url, "--model", "other") == 0
        assert "there is no model 'other' here" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (("--server", "ftp://x"), "is no address of a server"),
            (
                ("--server", "http://127.0.0.1:1"),
                "no server answers at http://127.0.0.1:1 (Connection refused): start one",
            ),
            (("--server", "127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
            (("--server", "http://127.0.0.1:99999"), "Port out of range"),
            (("--server", "http://x", "--milestone", "m3", "--logprobs", "2"), "leave out --logprobs, --milestone"),
            (("--server", "http://x", "--temperature", "-1"), "temperature must be"),
            (("--api-key", "x"), "say which with --server"),
        ],
    )
    def test_what_cannot_be(self, flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(*flags) == 2
        assert says in " ".join(capsys.readouterr().err.split())


class Interrupter(io.StringIO):
    """An output in whose middle Ctrl-C is pressed."""

    def write(self, text: str) -> int:
        before = self.tell()
        count = super().write(text)
        if before <= 40 < self.tell():
            os.kill(os.getpid(), signal.SIGINT)
        return count


class TestCtrlC:
    @pytest.fixture(autouse=True)
    def heard(self) -> Iterator[None]:
        """Also where the tests run in the background of a script, which ignores Ctrl-C."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, before)

    def chat(self, server: Background) -> Chat:
        return Chat(Server(server.url, "a-key", LONG))

    def test_it_stops_the_answer_here_and_there(self, server: Background, monkeypatch: pytest.MonkeyPatch) -> None:
        aborted = server.engine.counters.finished["abort"]
        monkeypatch.setattr(sys, "stdout", out := Interrupter())
        chat = self.chat(server)
        text = chat.answer("A long story, please.")
        assert out.getvalue() == text + "\n" and 40 < len(text) < 4000
        assert chat.messages[-1] == {"role": "assistant", "content": text}
        server.wait_until_idle()
        assert server.engine.counters.finished["abort"] == aborted + 1

    def test_before_the_first_word(self, server: Background) -> None:
        """It waits in the server's queue, behind another, and nothing arrives that would wake us."""
        other = Server(server.url, "a-key", LONG).stream([{"role": "user", "content": "Hello"}])
        assert next(text for text in other if text)

        def press() -> None:
            eventually(lambda: server.engine.num_queued == 1)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        assert self.chat(server).answer("And me?") == ""
        thread.join(PATIENCE)
        eventually(lambda: server.engine.num_open == 1)
        other.close()
        server.wait_until_idle()


class TestServersThatFail:
    """A server of one scripted response."""

    def answers(self, response: bytes) -> list[str]:
        with listen("127.0.0.1", 0) as listener:
            listener.listen()

            def serve() -> None:
                for _ in range(2):
                    connection, _ = listener.accept()
                    with connection, connection.makefile("rb") as request:
                        length = 0
                        for line in itertools.takewhile(lambda line: line != b"\r\n", request):
                            if line.lower().startswith(b"content-length:"):
                                length = int(line.split()[1])
                        request.read(length)  # to close before would lose the response
                        connection.sendall(response)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", model="x")
            try:
                return list(server.stream([{"role": "user", "content": "x"}]))
            finally:
                socket.create_connection(listener.getsockname()).close()
                thread.join(PATIENCE)

    def head(self, status: str = "200 OK") -> bytes:
        return f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode()

    def test_it_breaks_off(self) -> None:
        piece = b'data: {"choices": [{"delta": {"content": "Once"}}]}\n\n'
        with pytest.raises(ServerError, match="before the answer was over"):
            self.answers(self.head() + piece)
        with pytest.raises(ServerError, match="it died"):
            self.answers(self.head() + piece + b'data: {"error": {"message": "it died"}}\n\n')
        assert self.answers(self.head() + piece + b": a comment\n\ndata: [DONE]\n\n") == ["Once"]

    def test_it_refuses(self) -> None:
        with pytest.raises(ServerError, match="status 502"):
            self.answers(self.head("502 Bad Gateway") + b"<html>")
        with pytest.raises(ServerError, match="ended the connection"):
            self.answers(b"")
        with pytest.raises(ValueError, match="too long"):
            self.answers(self.head("400 Bad Request") + b'{"error": {"message": "too long"}}')

    def test_it_is_something_else(self) -> None:
        with pytest.raises(ServerError, match="not a server with OpenAI's API"), listen("127.0.0.1", 0) as listener:
            listener.listen()

            def serve() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(self.head() + b"<html>")

            threading.Thread(target=serve, daemon=True).start()
            Server(f"127.0.0.1:{listener.getsockname()[1]}")
