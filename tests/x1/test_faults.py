"""What goes wrong on the wire: nonsense, clients that go, clients that do not read. Others notice nothing of it."""

from __future__ import annotations

import gc
import json
import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from folovllm.electives.server.aggregator import Served
from folovllm.electives.server.stream import OutputCollector, Stream
from folovllm.electives.server.transport import ThreadEngineClient
from folovllm.engine.output_processor import RequestState
from tests.helpers import tiny_checkpoint
from tests.x1.background import PATIENCE, Background, events_in, eventually
from tests.x1.scripted import ScriptedEngine
from tests.x1.test_edges import connect, post, read_all

STORY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 120, "ignore_eos": True}


@pytest.fixture
def server(tiny_server: Background) -> Background:
    return tiny_server


def read_to_the_end(connection: socket.socket) -> str:
    """What a stream says, without HTTP's own lines."""
    said = b""
    while not said.endswith(b"0\r\n\r\n"):
        piece = connection.recv(1 << 16)
        assert piece, f"the server closed the connection after {said!r}"
        said += piece
    return "".join(choice["text"] for piece in events_in(said.decode()) for choice in piece["choices"])


class Readers:
    """Streams that run meanwhile, one after the other; each must say the whole story."""

    def __init__(self, server: Background) -> None:
        self._server = server
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.texts: list[str] = []

    def _read(self) -> None:
        while not self._enough.is_set() or not self.texts:
            with connect(self._server, post(STORY | {"stream": True})) as connection:
                self.texts.append(read_to_the_end(connection))

    def __enter__(self) -> Readers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(PATIENCE)


@pytest.fixture
def whole_story(server: Background) -> str:
    status, said = server.ask("/v1/completions", STORY)
    assert status == 200
    return str(said["choices"][0]["text"])


FIELDS = (
    "prompt", "messages", "model", "n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop",
    "stop_token_ids", "logprobs", "top_logprobs", "stream", "stream_options", "priority", "cache_salt", "echo", "tools",
    "logit_bias", "bad_words", "allowed_token_ids", "prompt_logprobs",
    "chat_template_kwargs", "tokens", "truncate_prompt_tokens", "tool_choice", "parallel_tool_calls", "response_format",
    "structured_outputs",
)  # fmt: skip
NAMES = st.sampled_from(["type", "json_schema", "schema", "json", "regex", "choice", "grammar", "function", "name"])
NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.just(-1),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | NAMES, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), NONSENSE, max_size=5)
BODIES = st.one_of(
    OBJECTS.map(lambda fields: json.dumps(fields).encode()),
    OBJECTS.map(lambda fields: json.dumps({"prompt": "x", "max_tokens": 1} | fields).encode()),
    OBJECTS.map(lambda fields: json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | fields).encode()),
    OBJECTS.map(lambda fields: json.dumps(fields).encode()[:-1]),
    st.binary(max_size=40),
    st.sampled_from([b"[" * 9_000, b'{"prompt":"' + b"x" * 60_000 + b'"}', b'{"prompt":"\xff\xfe"}', b'{"prompt":[1e400]}']),
)  # fmt: skip
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])


class TestNonsense:
    def test_every_refusal_is_a_sentence(self, server: Background, whole_story: str) -> None:
        """Whatever is sent: an answer or a 4xx with a sentence. Streams beside it are what they are alone."""
        refused: list[int] = []

        @settings(max_examples=200, suppress_health_check=list(HealthCheck))
        @given(PATHS, BODIES)
        def check(path: str, body: bytes) -> None:
            status, said = server.ask(path, body)
            assert status in (200, 400, 404, 413), said
            if status != 200:
                error = said["error"]
                assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) > 10
                refused.append(status)

        with Readers(server) as readers:
            check()
        assert len(refused) > 80
        assert set(readers.texts) == {whole_story}
        server.wait_until_idle()

    def test_too_long_a_body_is_heard_out(self, server: Background) -> None:
        """Its sender reads the answer once all is sent: a connection that was closed before would have lost it."""
        with connect(server, post({"prompt": "x" * 100_000})[:-100_000]) as connection:
            for _ in range(10):
                time.sleep(0.01)  # as a slow line does
                connection.sendall(b"x" * 10_000)
            connection.shutdown(socket.SHUT_WR)
            said = read_all(connection)
        assert said.startswith(b"HTTP/1.1 413") and json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]


class TestClientsThatSayNothing:
    def test_nobody_is_waited_for_for_ever(
        self, server: Background, whole_story: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not for a first byte, not for the rest of a head; but an answer takes the time it takes.

        Who is expected to be in time has said all before the clock runs, or at once: a busy machine makes nobody late.
        """
        story = STORY | {"stream": True}
        with connect(server, post(story | {"max_tokens": 1})) as connection:
            assert read_to_the_end(connection)
            monkeypatch.setattr("folovllm.electives.server.listener.HEADER_SECONDS", 0.05)
            connection.sendall(post(story))
            assert read_to_the_end(connection) == whole_story
        for begun in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
                connection.sendall(begun)
                assert connection.recv(1) == b""


class TestClientsThatGo:
    def test_at_random_moments(self, server: Background, whole_story: str) -> None:
        """150, in the middle of the body, before the first token, between tokens, or after a refusal: nothing is kept of them."""
        aborted = server.engine.counters.finished["abort"]
        with Readers(server) as readers, ThreadPoolExecutor(8) as clients:
            for _ in clients.map(lambda seed: self.go(server, random.Random(seed)), range(150)):
                pass
        assert set(readers.texts) == {whole_story}
        server.wait_until_idle()
        assert server.engine.counters.finished["abort"] > aborted
        eventually(lambda: not left())

    @staticmethod
    def go(server: Background, rng: random.Random) -> None:
        """Ask for something, read a little, perhaps nothing, and go."""
        fields: dict[str, Any] = rng.choice([
            STORY | {"stream": rng.random() < 0.7, "n": rng.choice([1, 3])},
            STORY | {"stream": True, "prompt": [[5, 6], [7]]},
            STORY | {"max_tokens": 5, "prompt": ["a", "b"], "stop": ["e"], "logprobs": 2},
            {"prompt": "x", "max_tokens": "many"},
            {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
        ])  # fmt: skip
        wire = post(fields, path="/v1/chat/completions" if "messages" in fields else "/v1/completions")
        with connect(server, wire[: len(wire) - rng.choice([0, 0, 0, 9])]) as connection:
            connection.settimeout(rng.random() * 0.1)
            try:
                for _ in range(rng.randrange(3)):
                    connection.recv(1 << rng.randrange(12))
            except TimeoutError:
                pass


def left() -> Counter[str]:
    """What the server holds of requests."""
    gc.collect()
    kinds = (Stream, RequestState, Served, OutputCollector)  # the scheduler's rows keep the sequences of its last step
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))


class TestClientsThatDoNotRead:
    def test_it_holds_up_nobody(self, server: Background, whole_story: str) -> None:
        """Its socket takes some thousand bytes, and it asked for more: the engine goes on, and others are answered."""
        fields = STORY | {"stream": True, "n": 8, "logprobs": 5}
        with connect(server, post(fields), buffer=4096) as lazy:
            with connect(server, post(STORY | {"stream": True})) as other:
                assert read_to_the_end(other) == whole_story
            eventually(lambda: server.engine.num_open == 0)  # all drawn, whoever reads it
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # now it reads, and quickly
            said = b""
            while not said.endswith(b"0\r\n\r\n"):
                said += lazy.recv(1 << 16)
        tokens = [
            len(choice["logprobs"]["tokens"]) for piece in events_in(said.decode()) for choice in piece["choices"]
        ]
        assert sum(tokens) == 8 * 120
        assert max(tokens) > 20, "what was not read was not kept piece by piece"


class PanicException(BaseException):
    """As a library in Rust raises it: no `Exception`."""


@pytest.mark.parametrize("error", [RuntimeError, PanicException])
def test_an_engine_that_has_ended(error: type[BaseException]) -> None:
    """However it ended, a panic included: those who wait are told, and so is who asks for its health."""

    class Ending(ScriptedEngine):
        def step(self) -> None:
            raise error("the device is gone")

    with Background(None, ThreadEngineClient(Ending), model=str(tiny_checkpoint())) as server:  # type: ignore[arg-type]
        _, said = server.ask("/v1/completions", {"prompt": [5], "stream": True})
        assert "the engine has ended: " in events_in(said)[0]["error"]["message"]
        status, said = server.ask("/v1/completions", {"prompt": [5], "max_tokens": 1})
        assert (status, said["error"]["code"]) == (500, "engine_dead")
        assert server.ask("/health")[0] == 503
