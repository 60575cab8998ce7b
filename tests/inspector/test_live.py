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
from folovllm.apps.inspector.live import Subscribers, as_event, is_beginning
from folovllm.apps.inspector.paced import PacedEngine
from folovllm.apps.inspector.replay import Recording, parse
from folovllm.apps.inspector.watcher import Watcher
from folovllm.electives.server.config import ServerConfig
from folovllm.engine import events as ev
from folovllm.engine.scheduler import Scheduler
from tests.helpers import tiny_checkpoint
from tests.inspector.test_recording import tokens_of
from tests.m5.test_events import World, engine
from tests.x1.background import PATIENCE, Background

BOTH = ["thread", pytest.param("process", marks=pytest.mark.slow)]
TIGHT = {"model": str(tiny_checkpoint()), "device": "cpu", "block_size": 4, "num_kv_blocks": 16, "max_model_len": 48}
TIGHT |= {"max_num_seqs": 4, "max_num_batched_tokens": 16, "milestone": "m5"}


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
def looking(server: Background, path: str = "/inspector/events", key: str | None = None) -> Iterator[Looker]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{server.url}{path}", headers=headers, timeout=PATIENCE) as response:
        yield Looker(response)


@pytest.fixture(scope="module", params=BOTH)
def server(request: pytest.FixtureRequest) -> Iterator[Background]:
    """Each test leaves it idle, and nobody looks any more."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "process":
            patch.setattr(sys, "executable", request.getfixturevalue("forked_commands"))
        with Background(ServerConfig(inspector=True, inspector_host=["gpu-box"]), request.param, **TIGHT) as server:
            yield server


def ask(server: Background, prompt: list[int], status: int = 200) -> None:
    """Ask for six tokens."""
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    assert server.ask("/v1/completions", body)[0] == status


def replayed(found: Recording) -> Watcher:
    """A watcher of it."""
    watcher = Watcher()
    for turn in found.turns():
        watcher(turn.events)
    return watcher


def test_the_stream_is_a_recording(server: Background) -> None:
    with looking(server) as looker:
        assert looker.response.status_code == 200
        assert looker.response.headers["content-type"].startswith("text/event-stream")
        looker.read_until(lambda line: line.startswith('["Turn"'))
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


class TestWhoMayLook:
    def test_without_the_flag_there_is_nothing(self) -> None:
        with Background(ServerConfig(), **TIGHT) as server:
            for path in ("/inspector", "/inspector/events", "/inspector/static/main.js"):
                assert server.ask(path)[0] == 404

    def test_the_stream_wants_the_key_and_the_page_does_not(self) -> None:
        with Background(ServerConfig(inspector=True, api_key=["secret"]), **TIGHT) as server:
            for key, status in ((None, 401), ("wrong", 401), ("secret", 200)):
                with looking(server, key=key) as looker:
                    assert looker.response.status_code == status
            page = httpx.get(f"{server.url}/inspector")
            assert page.status_code == 200 and '"needs_key":true' in page.text
            assert "default-src 'none'" in page.headers["content-security-policy"]

    def test_files_outside_are_not_there(self, server: Background) -> None:
        for name in ("../page.py", "%2e%2e/page.py", "..%2fpage.py", "no.js", "index.html"):
            assert server.ask(f"/inspector/static/{name}")[0] == 404, name
        main = httpx.get(f"{server.url}/inspector/static/main.js")
        assert main.headers["content-type"].startswith("text/javascript")


def test_an_engine_that_ends_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    with Background(ServerConfig(inspector=True), **TIGHT) as server, looking(server) as looker:
        looker.read_until(lambda line: line.startswith('["Turn"'))
        monkeypatch.setattr(Scheduler, "schedule", lambda self: 1 // 0)
        ask(server, [1], status=500)
        looker.read_until()
        assert looker.recording().how == "ZeroDivisionError: integer division or modulo by zero"


@pytest.mark.slow
def test_the_stream_ends_with_the_engine_process(warm: None) -> None:
    with Background(ServerConfig(inspector=True), "process", **TIGHT) as server, looking(server) as looker:
        looker.read_until(lambda line: line.startswith('["Turn"'))
        os.kill(server.engine._transport._process.pid, signal.SIGKILL)  # type: ignore[attr-defined, arg-type]
        assert not any(line.startswith('["Done"') for line in looker.read_until()), "it had no time to"


class TestLines:
    """Beside the engine."""

    def test_at_most_so_often(self) -> None:
        world, now = World(engine("m5"), 1), [0.0]
        lines = PacedEngine(world.engine, lambda: now[0])
        assert lines.take(all_of_it=True) == [] and lines.end_recording("closed") == []
        lines.watch(True)
        (beginning,) = lines.take(all_of_it=True)
        assert is_beginning(beginning) and beginning.count(b"\n") == 2, "header and snapshot"
        world.turn()
        now[0] = paced.PERIOD * 0.9
        assert lines.take(all_of_it=False) == [], "too soon"
        for _ in range(5):
            world.turn()
        lines._recorder.wait()  # type: ignore[union-attr]
        now[0] = paced.PERIOD * 1.1
        (piece,) = lines.take(all_of_it=False)
        assert piece.count(b'["Turn"') >= 6 and not is_beginning(piece)
        lines.watch(True)
        world.turn()
        pieces = lines.take(all_of_it=True)
        assert [is_beginning(piece) for piece in pieces] == [True, False], "who joins is told apart"
        (last,) = lines.end_recording("closed")
        assert b'["Done"' in last and world.engine.events.on  # the world's own listeners
        assert lines.take(all_of_it=True) == []

    def test_joined_at_any_moment_it_ends_in_the_same_state(self) -> None:
        world = World(engine("m6"), 2)
        lines = PacedEngine(world.engine)
        lines.watch(True)
        readers: list[list[bytes]] = [[]]
        for turn in range(60):
            if turn % 13 == 12:
                lines.watch(True)
                readers.append([])
            world.turn()
            for piece in lines.take(all_of_it=True):
                for reader in readers:
                    if bool(reader) != is_beginning(piece):
                        reader.append(piece)
        for reader in readers:
            watcher = replayed(parse(b"".join(reader).decode(), "joined"))
            own = {id_: (s.is_running, s.num_tokens, s.block_table) for id_, s in world.watcher.sequences.items()}
            found = {id_: (s.is_running, s.num_tokens, s.block_table) for id_, s in watcher.sequences.items()}
            assert found == own and watcher.cells == world.watcher.cells
        lines.end_recording("closed")


class TestReaders:
    """Beside the event loop; whoever asks `watch` for a beginning gets one when the test says so."""

    BEGINNING, MORE = b'{"format": 1}\n', b'["turn", 0]\n'

    def test_each_gets_what_is_for_it(self) -> None:
        asked: list[bool] = []
        subscribers = Subscribers(asked.append)
        first = subscribers.add()
        subscribers.publish([self.BEGINNING, self.MORE])
        second = subscribers.add()
        subscribers.publish([self.MORE, self.BEGINNING, self.MORE])
        assert first.read() == self.BEGINNING + 3 * self.MORE and second.read() == self.BEGINNING + self.MORE
        assert asked == [True, True]
        subscribers.remove(first)
        assert asked == [True, True]
        subscribers.remove(second)
        assert asked == [True, True, False]

    def test_one_who_does_not_read_begins_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live, "MOST_UNREAD", 100)
        asked: list[bool] = []
        subscribers = Subscribers(asked.append)

        async def story() -> list[bytes]:
            reader, quick = subscribers.add(), subscribers.add()
            stream, other = subscribers.events(reader), subscribers.events(quick)
            subscribers.publish([self.BEGINNING])
            got = [await anext(stream)]
            await anext(other)
            for _ in range(20):
                subscribers.publish([self.MORE])
                await anext(other)
            assert reader.is_lost and not reader.unread and not quick.is_lost
            waits = asyncio.ensure_future(anext(stream))
            while asked != [True, True, True]:  # its own beginning, asked for only now that it reads
                await asyncio.sleep(0)
            subscribers.publish([self.MORE, self.BEGINNING, self.MORE])
            got.append(await waits)
            return got

        assert asyncio.run(story()) == [as_event(self.BEGINNING), as_event(self.BEGINNING + self.MORE)]
