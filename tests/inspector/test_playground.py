"""The playground: an engine that the page builds anew, holds, slows down and feeds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from folovllm.apps.inspector.lines import Recording, Scored, StepEnded, parse
from folovllm.apps.inspector.playground import CONTROLS, DEFAULTS, Playground
from folovllm.apps.inspector.scenes import Sampling, scenes
from folovllm.apps.inspector.serve import playground_app, replay_app
from folovllm.engine.scheduler import Scheduler
from tests.helpers import tiny_checkpoint
from tests.inspector.test_recording import replayed

MODEL = {"model": str(tiny_checkpoint()), "device": "cpu"}
SMALL = {"num_kv_blocks": 12, "block_size": 4, "max_num_seqs": 4}
DATA = Path(__file__).parent / "data"


class Page:
    """What a page sees: the lines since the last header."""

    def __init__(self, playground: Playground) -> None:
        self.playground, self.lines, self.num_headers = playground, list[bytes](), 0
        self._reader = playground.subscribers.add()
        self._stream = playground.subscribers.events(self._reader)

    async def see(self, holds: Callable[[bytes], bool]) -> None:
        """Read until a line for which it holds."""
        while True:
            event = await anext(self._stream)
            for line in event.removeprefix(b"data: ").strip().split(b"\ndata: "):
                if line.startswith(b"{"):
                    self.lines, self.num_headers = [], self.num_headers + 1
                self.lines.append(line)
            if any(holds(line) for line in event.split(b"\n")):
                return

    def recording(self) -> Recording:
        return parse(b"".join(line + b"\n" for line in self.lines).decode(), "page")

    def count(self, name: str) -> int:
        return sum(line.count(f'["{name}"'.encode()) for line in self.lines)


def play(story: Callable[[Playground, Page], Awaitable[None]], **overrides: Any) -> None:
    async def run() -> None:
        fields = MODEL | SMALL | overrides
        playground = Playground({name: value for name, value in fields.items() if value is not None})
        await playground.change_pace(delay=0.0)
        await playground.build({})
        try:
            async with asyncio.timeout(60):
                page = Page(playground)
                await page.see(lambda line: b'["Turn"' in line)
                await story(playground, page)
        finally:
            await playground.close()

    asyncio.run(run())


def has(name: str) -> Callable[[bytes], bool]:
    return lambda line: f'["{name}"'.encode() in line


def test_every_milestone_in_the_same_memory() -> None:
    async def story(playground: Playground, page: Page) -> None:
        for number, milestone in enumerate(("m1", "m2", "m3", "m4", "m5", "m6"), 2):
            await playground.build({"milestone": milestone})
            await page.see(has("Snapshot"))
            header = page.recording().header["engine"]
            assert header["milestone"] == milestone
            assert header["num_kv_blocks"] * header["block_size"] == (0 if milestone == "m1" else 48)
            await playground.ask(["ab"], max_tokens=3)
            await page.see(has("Finished"))
            assert page.num_headers == number, "the stream began anew"

    play(story)


def test_what_cannot_be_is_refused_and_leaves_the_engine() -> None:
    """A setting; prompts, of which then none is served."""

    async def story(playground: Playground, page: Page) -> None:
        for changes, says in (
            ({"milestone": "m9"}, "milestone must be one of m1"),
            ({"num_kv_blocks": 0}, "num_kv_blocks must be a whole number from 2"),
            ({"num_kv_blocks": True}, "num_kv_blocks must be a whole number"),
            ({"enable_prefix_caching": 1}, "must be true or false"),
            ({"block_size": 5}, "block_size must be one of 1, 4"),
            ({"model": "x"}, "there is no setting 'model'"),
        ):
            with pytest.raises(ValueError, match=says):
                await playground.build(changes)
        for prompts, options, says in (
            (["ab", "x" * 400], {}, "tokens"),
            ([], {}, "the number of prompts must be from 1"),
            (["a"], {"max_tokens": 0}, "max_tokens must be from 1"),
            (["a"], {"temperature": -1.0}, "temperature"),
        ):
            with pytest.raises(ValueError, match=says):
                await playground.ask(prompts, **options)
        await playground.ask(["ab"], max_tokens=3)
        await page.see(has("Finished"))
        assert (page.num_headers, page.count("RequestAdded")) == (1, 1)

    play(story)


def test_a_scene_is_played() -> None:
    """Its requests come one after the other, to its own engine; what the reader ends does not come later."""

    async def story(playground: Playground, page: Page) -> None:
        await playground.change_pace(delay=0.0)
        await playground.play("memory")
        while page.count("Finished") < len(scenes()["memory"].requests):
            await page.see(has("Finished"))
        assert page.count("Preempted") > 0 and playground.settings["num_kv_blocks"] == 12
        await playground.change_pace(delay=2.0)
        await playground.play("memory")
        while page.count("RequestAdded") < 3:
            await page.see(has("RequestAdded"))
        await playground.abort(None)
        assert playground._arriving is None

    play(story, model="stories-5m")


def test_how_each_token_is_chosen() -> None:
    """The scene runs as the reader's sliders say, and so do the reader's prompts; each step says what it thought of every token."""

    async def story(playground: Playground, page: Page) -> None:
        await playground.change_pace(delay=0.0)
        await playground.play("choose", Sampling(temperature=0))
        await page.see(has("Finished"))
        await playground.ask(["The sea was"], max_tokens=3, sampling=Sampling(top_k=1))
        await page.see(has("Finished"))
        events = [event for turn in page.recording().turns() for event in turn.events]
        found = [event for event in events if isinstance(event, Scored | StepEnded)]
        assert len(found) > 2 * 3, "the page may have come after the first steps of the scene"
        for scored, ended in zip(found[::2], found[1::2], strict=True):
            assert isinstance(scored, Scored) and isinstance(ended, StepEnded)
            likeliest = int(np.frombuffer(scored.logprobs, np.float16).argmax())
            assert ended.sampled == [(scored.seq_id, [likeliest])]
        await playground.ask(["The sea was"], max_tokens=3)
        await page.see(has("Finished"))
        assert page.count("Scored") == len(found) // 2, "only where a request asks for it"

    play(story, model="stories-5m")


KINDS = {  # of an elective's settings: what happens with them
    "DraftsVerified": ({"draft_tokens": 2}, {"draft_tokens": 2, "draft_head": True}, {"draft_tokens": 2, "draft_head": True, "states": True}),
    "ExpertsAsked": ({"experts": True},),
    "SnapshotCached": ({"states": True},),
}  # fmt: skip


def test_drafts_experts_and_states() -> None:
    async def story(playground: Playground, page: Page) -> None:
        for event, settings in KINDS.items():
            for changes in settings:
                await playground.build(DEFAULTS | changes)
                await playground.ask(
                    ["Once upon a time, in a small house near the sea, there lived a girl"], max_tokens=9
                )
                await page.see(has("Finished"))
                assert page.count(event) > 0, changes
        replayed(page.recording())

    play(story, model=None)


def test_held_it_takes_the_steps_that_it_is_given() -> None:
    async def story(playground: Playground, page: Page) -> None:
        await playground.change_pace(paused=True)
        (name,) = (await playground.ask(["ab"], max_tokens=8, temperature=0.0))["requests"]
        await page.see(has("RequestAdded"))  # who waits is seen
        assert page.count("StepBegan") == 0
        await playground.change_pace(step=2)
        while page.count("StepEnded") < 2:
            await page.see(has("StepEnded"))
        await playground.abort(name)
        await page.see(has("Aborted"))
        assert page.count("StepEnded") == 2
        await playground.ask(["cd"], max_tokens=3)
        await playground.ask(["ef"], max_tokens=3)
        await playground.abort(None)
        while page.count("Aborted") < 3:
            await page.see(has("Aborted"))
        await playground.ask(["gh"], max_tokens=3)
        await playground.change_pace(paused=False)
        await page.see(has("Finished"))

    play(story)


def test_wrong_code_ends_the_engine_and_another_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(playground: Playground, page: Page) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "schedule", lambda self: 1 // 0)
            await playground.ask(["ab"])
            await page.see(has("Done"))
            assert "ZeroDivisionError" in str(page.recording().how)
            while playground.error is None:
                await asyncio.sleep(0)
        assert "ZeroDivisionError" in str(playground.described()["error"])
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await playground.ask(["ab"])
        await playground.build({})
        assert playground.described()["error"] is None
        await playground.ask(["ab"], max_tokens=2)
        await page.see(has("Finished"))

    play(story)


def test_the_page_and_its_scenes_need_no_torch() -> None:
    """They are answered before torch is imported, which takes seconds; until then a prompt is refused with the reason."""
    code = """
import sys
from starlette.testclient import TestClient
from folovllm.apps.inspector.playground import Playground
from folovllm.apps.inspector.serve import playground_app
client = TestClient(playground_app(Playground({}), "127.0.0.1"), base_url="http://localhost:8001")
assert '"kind":"playground"' in client.get("/inspector").text
assert client.get("/inspector/static/main.js").status_code == 200
assert client.get("/inspector/scenes/memory.jsonl").status_code == 200
assert client.get("/inspector/playground").json()["loading"]
refused = client.post("/inspector/playground/prompts", json={"prompts": ["a"]})
assert refused.status_code == 503 and "ask again" in refused.json()["error"]["message"]
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def client() -> Iterator[TestClient]:
    """A client of a playground, whose engine ends with it."""
    playground, before = Playground(MODEL | SMALL), threading.enumerate()
    with TestClient(playground_app(playground, "127.0.0.1"), base_url="http://localhost:8001") as client:
        yield client
        assert client.portal
        client.portal.call(playground.close)
    left = {thread.name for thread in set(threading.enumerate()).difference(before)}
    assert not left & {"engine", "recorder"}


class TestAddresses:
    def test_the_playground(self, client: TestClient) -> None:
        assert client.post("/inspector/playground", json={}).status_code == 200
        said = client.get("/inspector/playground").json()
        assert [field["name"] for field in said["fields"]] == [
            name for name in CONTROLS if name not in ("experts", "states")
        ]
        assert (said["mine"], said["error"], said["paused"]) == (0, None, 0)
        page = client.get("/", follow_redirects=True)
        assert '"kind":"playground"' in page.text and page.url.path == "/inspector"
        assert client.post("/inspector/playground", json={"block_size": 16}).json()["fields"][2]["value"] == 16
        for path, body, answer in (
            ("pace", {"delay": 0, "paused": True}, {"delay": 0, "paused": 1}),
            ("pace", {"paused": False}, {"delay": 0, "paused": 0}),
            ("prompts", {"prompts": ["a"], "max_tokens": 2}, {"requests": ["0"]}),
            ("abort", {"request": "7"}, {"error": None}),
        ):
            assert client.post(f"/inspector/playground/{path}", json=body).json().items() >= answer.items()

    def test_scenes_and_their_chapters(self, client: TestClient) -> None:
        scene = scenes()["blocks"]
        for file in scene.files:
            assert client.get(f"/inspector/scenes/{file.name}").content == file.read_bytes()
        chapter = client.get(f"/inspector/book/{scene.chapter}.md")
        assert chapter.status_code == 200 and chapter.headers["content-type"].startswith("text/plain")
        for path in ("scenes/scenes.json", "scenes/none.jsonl", "book/index.md", "book/..%2Fpyproject.md"):
            assert client.get(f"/inspector/{path}").status_code == 404

    @pytest.mark.parametrize(
        ("path", "body", "headers", "status", "says"),
        [
            ("", {"block_size": 5}, {}, 400, "block_size must be"),
            ("/prompts", {}, {}, 400, "prompts"),
            ("/prompts", {"prompts": [], "best_of": 2}, {}, 400, "best_of"),
            ("/pace", {"delay": 99}, {}, 400, "delay must be"),
            ("/scene", {"scene": "none"}, {}, 400, "known are choose"),
            ("/nothing", {}, {}, 404, "not found"),
            ("/prompts", {"prompts": ["a"]}, {"Content-Type": "text/plain"}, 415, "application/json"),
            ("/prompts", {"prompts": ["a"]}, {"Origin": "http://evil.example"}, 403, "evil.example"),
            ("/prompts", {"prompts": ["a"]}, {"Host": "evil.example"}, 403, "--host evil.example"),
        ],
    )
    def test_what_is_refused(
        self, client: TestClient, path: str, body: Any, headers: dict[str, str], status: int, says: str
    ) -> None:
        """Mistakes, and pages of others."""
        answer = client.post(
            f"/inspector/playground{path}",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"} | headers,
        )
        assert answer.status_code == status and says in answer.json()["error"]["message"].replace(
            "Not Found", "not found"
        )

    def test_recordings(self) -> None:
        files = [DATA / "m2.jsonl", DATA / "m3.jsonl"]
        with TestClient(replay_app(files, "127.0.0.1"), base_url="http://localhost:8001") as client:
            page = client.get("/inspector").text
            for i, file in enumerate(files):
                assert f'{{"name":"{file.name}","url":"inspector/recordings/{i}"}}' in page
                assert client.get(f"/inspector/recordings/{i}").content == file.read_bytes()
            assert client.get("/inspector/recordings/2").status_code == 404
