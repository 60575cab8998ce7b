"""What a running server's engine does is told to those who look, and only to them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import httpx
import pytest

from folovllm.apps.inspector import live, paced
from folovllm.apps.inspector.lines import Recording, parse
from folovllm.apps.inspector.live import Subscribers, as_event, is_beginning
from folovllm.apps.inspector.paced import PacedEngine
from folovllm.electives.server.config import ServerConfig
from folovllm.engine import events as ev
from folovllm.engine.scheduler import Scheduler
from tests.helpers import tiny_checkpoint
from tests.inspector.test_recording import replayed, state_of, tokens_of
from tests.m5.test_events import World, engine
from tests.x1.background import PATIENCE, Background

TIGHT = {"model": str(tiny_checkpoint()), "device": "cpu", "block_size": 4, "num_kv_blocks": 16, "max_model_len": 48}
TIGHT |= {"max_num_seqs": 4, "max_num_batched_tokens": 16, "milestone": "m5"}
LOOKS = ServerConfig(inspector=True)


@dataclass
class Looker:
    """A client of the stream."""

    response: httpx.Response
    lines: list[str] = field(default_factory=list)

    def read_until(self, holds: Callable[[str], bool] = lambda _: False) -> list[str]:
        """Lines up to the first for which it holds, or to the end of the stream."""
        for line in self._lines:
            self.lines.append(line)
            if holds(line):
                break
        return self.lines

    @cached_property
    def _lines(self) -> Iterator[str]:
        return (line.removeprefix("data: ") for line in self.response.iter_lines() if line.startswith("data: "))

    def recording(self) -> Recording:
        return parse("".join(line + "\n" for line in self.lines), "live")


@contextmanager
def looking(url: str, key: str | None = None) -> Iterator[Looker]:
    """A client of a stream, once its first turn has come, unless it is refused."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{url}/events", headers=headers, timeout=PATIENCE) as response:
        looker = Looker(response)
        if response.status_code == 200:
            looker.read_until(lambda line: line.startswith('["Turn"'))
        yield looker


def ask(server: Background, prompt: list[int], status: int = 200) -> None:
    """Ask for six tokens."""
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    assert server.ask("/v1/completions", body)[0] == status


@pytest.mark.parametrize("transport", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_the_stream_is_a_recording(
    transport: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the engine's process, which had no time to say so."""
    if transport == "process":
        monkeypatch.setattr(sys, "executable", request.getfixturevalue("forked_commands"))
    with Background(LOOKS, transport, **TIGHT) as server, looking(f"{server.url}/inspector") as looker:
        assert looker.response.headers["content-type"].startswith("text/event-stream")
        for prompt in ([1] * 9, [1] * 8 + [7]):
            ask(server, prompt)
        while sum(line.count('["Finished"') for line in looker.lines) < 2:
            looker.read_until(lambda line: '["Finished"' in line)
        found = looker.recording()
        assert found.header["engine"]["block_size"] == 4 and found.header["title"] == "live"
        watcher = replayed(found)
        assert not watcher.sequences and sum(cell.hash is not None for cell in watcher.cells) >= 3
        tokens = list(tokens_of(found).values())
        assert [ids[:9] for ids in tokens] == [[1] * 9, [1] * 8 + [7]] and [len(ids) for ids in tokens] == [15, 15]
        kinds = {type(event) for turn in found.turns() for event in turn.events}
        assert {ev.PrefixHit, ev.BlockCached, ev.TableFreed} <= kinds
        if transport == "process":
            os.kill(server.engine._transport._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            assert not any(line.startswith('["Done"') for line in looker.read_until())


def test_who_may_look_and_how_an_engine_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream wants the key; the page does not, and files outside its folder are not there."""
    config = ServerConfig(inspector=True, api_key=["secret"])
    with Background(config, **TIGHT) as server, looking(page := f"{server.url}/inspector", "secret") as looker:
        for key in (None, "wrong"):
            with looking(page, key) as refused:
                assert refused.response.status_code == 401
        answer, main = httpx.get(page), httpx.get(f"{page}/static/main.js")
        assert answer.status_code == 200 and '"needs_key":true' in answer.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert main.headers["content-type"].startswith("text/javascript")
        for name in ("../page.py", "%2e%2e/page.py", "..%2fpage.py", "no.js", "index.html"):
            assert server.ask(f"/inspector/static/{name}")[0] == 404, name
        monkeypatch.setattr(Scheduler, "schedule", lambda self: 1 // 0)
        ask(server, [1], status=500)
        looker.read_until()
        assert looker.recording().how == "ZeroDivisionError: integer division or modulo by zero"


def test_without_the_flag_there_is_nothing() -> None:
    with Background(ServerConfig(), **TIGHT) as server:
        for path in ("/inspector", "/inspector/events", "/inspector/static/main.js"):
            assert server.ask(path)[0] == 404


class TestPieces:
    """Beside the engine, and for those who read them."""

    def test_at_most_so_often(self) -> None:
        world, now = World(engine("m5"), 1), [0.0]
        lines = PacedEngine(world.engine, lambda: now[0])
        assert lines.take(all_of_it=True) == [] and lines.end_recording("closed") == []
        lines.watch(True)
        (beginning,) = lines.take(all_of_it=True)
        assert is_beginning(beginning) and beginning.count(b"\n") == 2, "header and snapshot"
        now[0] = paced.PERIOD * 0.9
        world.turn()
        assert lines.take(all_of_it=False) == [], "too soon"
        for _ in range(5):
            world.turn()
        lines._recorder.wait()  # type: ignore[union-attr]
        now[0] = paced.PERIOD * 1.1
        pieces = lines.take(all_of_it=False)
        assert b"".join(pieces).count(b'["Turn"') >= 6 and not any(map(is_beginning, pieces))
        lines.watch(True)
        world.turn()
        first, *others = lines.take(all_of_it=True)
        assert is_beginning(first) and others and not any(map(is_beginning, others)), "who joins is told apart"
        assert b'["Done"' in lines.end_recording("closed")[-1] and world.engine.events.on  # the world's own listeners
        assert lines.take(all_of_it=True) == []

    def test_joined_at_any_moment_it_ends_in_the_same_state(self) -> None:
        world = World(engine("m6"), 2)
        lines = PacedEngine(world.engine)
        subscribers = Subscribers(lines.watch)
        readers = [subscribers.add()]
        for turn in range(60):
            if turn % 13 == 12:
                readers.append(subscribers.add())
            world.turn()
            subscribers.publish(lines.take(all_of_it=True))
        for reader in readers:
            found = parse(reader.read().decode(), "joined")
            assert state_of(replayed(found)) == state_of(world.watcher)
            subscribers.remove(reader)
        assert lines._recorder is None, "nobody looks any more"

    def test_one_who_does_not_read_begins_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        beginning, more = b'{"format": 1}' + 200 * b" " + b"\n", b'["turn", 0]\n'  # a long beginning harms nobody
        monkeypatch.setattr(live, "MOST_UNREAD", 100)
        asked: list[bool] = []
        subscribers = Subscribers(asked.append)

        async def story() -> list[bytes]:
            reader, quick = subscribers.add(), subscribers.add()
            stream, other = subscribers.events(reader), subscribers.events(quick)
            subscribers.publish([beginning])
            got = [await anext(stream)]
            await anext(other)
            for _ in range(40):
                subscribers.publish([more])
                await anext(other)
            assert reader.is_lost and not reader.unread and not quick.is_lost
            waits = asyncio.ensure_future(anext(stream))
            while asked != [True, True, True]:  # its own beginning, asked for only now that it reads
                await asyncio.sleep(0)
            subscribers.publish([more, beginning, more])
            got.append(await waits)
            return got

        assert asyncio.run(story()) == [as_event(beginning), as_event(beginning + more)]
