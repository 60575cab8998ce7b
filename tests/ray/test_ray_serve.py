"""`examples/ray_serve.py` with real Ray: two engines on logical CPUs, and one of them is killed while it serves."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIError, BadRequestError, OpenAI

from folovllm import LLM, SamplingParams
from tests.ray.cluster import PATIENCE, Ray, eventually, running

pytest.importorskip("ray.serve", reason='needs Ray: pip install "folovllm[serve,ray]"')
pytestmark = pytest.mark.timeout(500)
GREEDY: Any = {"model": "stories-5m", "temperature": 0, "max_tokens": 20}
LONG: Any = {"model": "stories-5m", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
BOTH = 2


class Cluster:
    """Engines behind one address."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def chat(self, messages: list[Any], **fields: Any) -> tuple[int, Any]:
        """The process of the engine that answers, and its answer, or its stream."""
        raw = self.client.chat.completions.with_raw_response.create(messages=messages, **(GREEDY | fields))
        return int(raw.headers["x-engine"].rpartition(":")[2]), raw.parse()

    def streams(self) -> dict[int, Any]:
        """A long answer that has begun, by engine: one for each."""
        found: dict[int, Any] = {}
        for i in range(100):
            engine, stream = self.chat([user(f"Story {i}")], stream=True, **LONG)
            if engine in found:
                stream.close()
                continue
            next(stream)
            found[engine] = stream
            if len(found) == BOTH:
                return found
        raise AssertionError("all conversations go to one engine")

    def figures(self, name: str) -> dict[str, float]:
        """A figure of each engine."""

        def look() -> dict[str, float] | None:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as response:
                value = re.search(rf"^{re.escape(name)} (\S+)", response.read().decode(), re.MULTILINE)
                found[response.headers["x-engine"]] = float(value[1]) if value else 0.0
            return found if len(found) == BOTH else None

        found: dict[str, float] = {}
        return eventually(look)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def serving(ray: Ray, *arguments: str) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fixed = ("--engines", str(BOTH), "--device", "cpu", "--port", str(port))
    return running(ray, "ray_serve.py", *fixed, *arguments, says=r"^serving 2 engines at (\S+)/v1")


def test_by_load(ray: Ray) -> None:
    """One conversation's requests go to whichever engine has less to do. First, for Ray has one `serve` at a time."""
    with serving(ray, "--route", "load") as said:
        cluster = Cluster(said[1])
        streams = [cluster.chat([user("The same")], stream=True, **LONG) for _ in range(6)]
        assert len({engine for engine, _ in streams}) == BOTH
        for _, stream in streams:
            stream.close()


@pytest.fixture(scope="module")
def cluster(ray: Ray) -> Iterator[Cluster]:
    with serving(ray) as said:
        yield Cluster(said[1])


def test_it_answers_as_one_engine_would(cluster: Cluster) -> None:
    with LLM(use_tqdm=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=20)
        (expected,) = llm.chat([user("Tell me about Lily.")], params, use_tqdm=False)
    _, whole = cluster.chat([user("Tell me about Lily.")])
    _, chunks = cluster.chat([user("Tell me about Lily.")], stream=True)
    streamed = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert whole.choices[0].message.content == "".join(streamed) == expected["text"] and len(streamed) > 2
    with pytest.raises(BadRequestError, match="temperature must be"):
        cluster.chat([user("x")], temperature=-1)
    with urllib.request.urlopen(cluster.url, timeout=PATIENCE) as response:
        assert b"<title>FoloVLLM" in response.read()


def test_a_conversation_stays_with_one_engine(cluster: Cluster) -> None:
    """Its turns find their predecessors in the prefix cache; and conversations are spread."""
    seen = set()
    for i in range(100):
        messages = [{"role": "system", "content": "Be kind. " * 8}, user(f"Tell me about cat number {i}.")]
        engines = []
        for turn in range(3):
            engine, answer = cluster.chat(messages)
            engines.append(engine)
            usage = answer.usage.prompt_tokens_details
            assert turn == 0 or usage.cached_tokens >= 32
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, user("And then?")]
        assert len(set(engines)) == 1
        seen.add(engines[0])
        if len(seen) == BOTH:
            break
    assert len(seen) == BOTH


def test_a_client_that_leaves_is_not_worked_for(cluster: Cluster) -> None:
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="stories-5m"}'
    before = sum(cluster.figures(aborted).values())
    _, stream = cluster.chat([user("A long story")], stream=True, **LONG)
    next(stream)
    stream.close()
    eventually(lambda: sum(cluster.figures(aborted).values()) == before + 1)
    eventually(
        lambda: not sum(cluster.figures('vllm:num_requests_running{engine="0",model_name="stories-5m"}').values())
    )


def test_an_engine_is_killed(cluster: Cluster) -> None:
    """Streams that it had begun end with an error, what it had not begun is answered by others, as are new requests."""
    streams = cluster.streams()
    (victim, broken), (survivor, other) = streams.items()
    waits: list[tuple[int, Any]] = []
    messages = [user(f"Story {next(i for i in range(100) if cluster.chat([user(f'Story {i}')])[0] == victim)}")]
    asking = threading.Thread(target=lambda: waits.append(cluster.chat(messages, **LONG | {"max_tokens": 600})))
    asking.start()
    eventually(
        lambda: max(cluster.figures('vllm:num_requests_running{engine="0",model_name="stories-5m"}').values()) == 2
    )
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(APIError, match="the engine that answered has died"):
        for _ in broken:
            pass
    for i in range(10):
        engine, answer = cluster.chat([user(f"Story {i}")])
        assert engine != victim and answer.choices[0].message.content
    assert list(other)[-1].choices[0].finish_reason == "length"  # beside all that, it went on to its end
    asking.join(PATIENCE)
    ((engine, answer),) = waits
    assert engine != victim and answer.usage.completion_tokens == 600
    replaced = eventually(lambda: set(cluster.figures("x")) - {f"{socket.gethostname()}:{survivor}"})
    assert f"{socket.gethostname()}:{victim}" not in replaced  # there are two again
