"""The playground: an engine that the page builds anew, holds, slows down and feeds."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

from folovllm.apps.inspector.lines import Recording, Scored, StepEnded, parse
from folovllm.apps.inspector.playground import Playground, Settings
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
        self._stream = playground.subscribers.events(playground.subscribers.add())

    async def see(self, name: str, times: int = 0) -> None:
        """Read until an event comes that has this name, and as often as `times` since the last header."""
        while True:
            event = await anext(self._stream)
            for line in event.removeprefix(b"data: ").strip().split(b"\ndata: "):
                if line.startswith(b"{"):
                    self.lines, self.num_headers = [], self.num_headers + 1
                self.lines.append(line)
            if f'["{name}"'.encode() in event and self.count(name) >= times:
                return

    def recording(self) -> Recording:
        return parse(b"".join(line + b"\n" for line in self.lines).decode(), "page")

    def count(self, name: str) -> int:
        return sum(line.count(f'["{name}"'.encode()) for line in self.lines)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def page(request: pytest.FixtureRequest) -> AsyncIterator[Page]:
    """A page of a playground that is as fast as it can be; a parameter says which model it has."""
    model = getattr(request, "param", MODEL)
    playground = Playground(SMALL | model)
    await playground.change_pace(delay=0.0)
    await playground.build({})
    page = Page(playground)
    await page.see("Turn")
    yield page
    await playground.close()


STORIES = pytest.mark.parametrize("page", [{"model": "stories-5m", "device": "cpu"}], indirect=True)
EMBEDDED = pytest.mark.parametrize("page", [{"device": "cpu"}], indirect=True)


@pytest.mark.anyio
async def test_every_milestone_in_the_same_memory(page: Page) -> None:
    for number, milestone in enumerate(("m1", "m2", "m3", "m4", "m5", "m6"), 2):
        await page.playground.build({"milestone": milestone})
        await page.see("Snapshot")
        header = page.recording().header["engine"]
        assert header["milestone"] == milestone
        assert header["num_kv_blocks"] * header["block_size"] == (0 if milestone == "m1" else 48)
        await page.playground.ask(["ab"], max_tokens=3)
        await page.see("Finished")
        assert page.num_headers == number, "the stream began anew"


@pytest.mark.anyio
async def test_what_cannot_be_keeps_the_engine_and_all_prompts_out(page: Page) -> None:
    with pytest.raises(ValueError, match="block_size"):
        await page.playground.build({"block_size": 5})
    with pytest.raises(ValueError, match="tokens"):
        await page.playground.ask(["ab", "x" * 400])
    await page.playground.ask(["ab"], max_tokens=3)
    await page.see("Finished")
    assert (page.num_headers, page.count("RequestAdded")) == (1, 1)


@STORIES
@pytest.mark.anyio
async def test_a_scene_is_played(page: Page) -> None:
    """Its requests come one after the other, to its own engine; what the reader ends does not come later."""
    playground = page.playground
    await playground.play("memory")
    await page.see("Finished", times=len(scenes()["memory"].requests))
    assert page.count("Preempted") > 0 and playground.settings.num_kv_blocks == 12
    await playground.change_pace(delay=2.0)
    await playground.play("memory")
    await page.see("Snapshot")
    await page.see("RequestAdded", times=3)
    await playground.abort(None)
    assert playground._arriving is None


@STORIES
@pytest.mark.anyio
async def test_how_each_token_is_chosen(page: Page) -> None:
    """The scene runs as the reader's sliders say, and so do the reader's prompts; each step says what it thought of every token."""
    playground = page.playground
    await playground.play("choose", Sampling(temperature=0))
    await page.see("Finished")
    await playground.ask(["The sea was"], max_tokens=3, sampling=Sampling(top_k=1))
    await page.see("Finished")
    events = [event for turn in page.recording().turns() for event in turn.events]
    found = [event for event in events if isinstance(event, Scored | StepEnded)]
    assert len(found) > 2 * 3, "the page may have come after the first steps of the scene"
    for scored, ended in zip(found[::2], found[1::2], strict=True):
        assert isinstance(scored, Scored) and isinstance(ended, StepEnded)
        likeliest = int(np.frombuffer(scored.logprobs, np.float16).argmax())
        assert ended.sampled == [(scored.seq_id, [likeliest])]
    await playground.ask(["The sea was"], max_tokens=3)
    await page.see("Finished")
    assert page.count("Scored") == len(found) // 2, "only where a request asks for it"


ELECTIVES = [  # settings, and what happens with them
    ({"draft_tokens": 2}, "DraftsVerified"),
    ({"draft_tokens": 2, "draft_head": True}, "DraftsVerified"),
    ({"draft_tokens": 2, "draft_head": True, "states": True}, "DraftsVerified"),
    ({"experts": True}, "ExpertsAsked"),
    ({"states": True}, "SnapshotCached"),
]


@EMBEDDED
@pytest.mark.anyio
async def test_drafts_experts_and_states(page: Page) -> None:
    for changes, event in ELECTIVES:
        await page.playground.build(msgspec.structs.asdict(Settings()) | changes)
        await page.playground.ask(["Once upon a time, in a small house near the sea, there lived a girl"], max_tokens=9)
        await page.see("Finished")
        assert page.count(event) > 0, changes
    replayed(page.recording())


@pytest.mark.anyio
async def test_held_it_takes_the_steps_that_it_is_given(page: Page) -> None:
    playground = page.playground
    await playground.change_pace(paused=True)
    (name,) = (await playground.ask(["ab"], max_tokens=8, temperature=0.0))["requests"]
    await page.see("RequestAdded")  # who waits is seen
    assert page.count("StepBegan") == 0
    await playground.change_pace(step=2)
    await page.see("StepEnded", times=2)
    await playground.abort(name)
    await page.see("Aborted")
    assert page.count("StepEnded") == 2
    await playground.ask(["cd", "ef"], max_tokens=3)
    await playground.abort(None)
    await page.see("Aborted", times=3)
    await playground.ask(["gh"], max_tokens=3)
    await playground.change_pace(paused=False)
    await page.see("Finished")


@pytest.mark.anyio
async def test_wrong_code_ends_the_engine_and_another_can_be_built(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    playground = page.playground
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "schedule", lambda self: 1 // 0)
        await playground.ask(["ab"])
        await page.see("Done")
        assert "ZeroDivisionError" in str(page.recording().how)
        while playground.error is None:
            await asyncio.sleep(0)
    assert "ZeroDivisionError" in str(playground.described()["error"])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        await playground.ask(["ab"])
    await playground.build({})
    assert playground.described()["error"] is None
    await playground.ask(["ab"], max_tokens=2)
    await page.see("Finished")


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
assert client.get("/inspector/recordings/0").status_code == 200
assert client.get("/inspector/playground").json()["loading"]
refused = client.post("/inspector/playground/prompts", json={"prompts": ["a"]})
assert refused.status_code == 503 and "ask again" in refused.json()["error"]["message"]
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def idle() -> Iterator[TestClient]:
    """A client of a playground without an engine yet."""
    yield TestClient(playground_app(Playground(MODEL), "127.0.0.1"), base_url="http://localhost:8001")


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


def test_addresses(client: TestClient) -> None:
    """Of the playground; of scenes and their chapters."""
    assert client.post("/inspector/playground", json={}).status_code == 200
    said = client.get("/inspector/playground").json()
    assert said["fields"].keys() == set(Settings.__struct_fields__) - {"experts", "states"}
    assert said["values"]["block_size"] == 4 and (said["mine"], said["error"], said["paused"]) == (False, None, False)
    page = client.get("/", follow_redirects=True)
    assert '"kind":"playground"' in page.text and page.url.path == "/inspector"
    for path, body, answer in (
        ("", {"milestone": "m3"}, {"values": said["values"] | {"milestone": "m3"}}),
        ("/pace", {"delay": 0, "paused": True}, {"delay": 0, "paused": True}),
        ("/pace", {"paused": False}, {"delay": 0, "paused": False}),
        ("/prompts", {"prompts": ["a"], "max_tokens": 2}, {"requests": ["0"]}),
        ("/abort", {"request": "7"}, {"error": None}),
    ):
        assert client.post(f"/inspector/playground{path}", json=body).json().items() >= answer.items()
    (told,) = re.findall(r'id="source">(.*?)</script>', page.text)
    for scene in json.loads(told)["scenes"]:
        for described, file in zip(scene["recordings"], scenes()[scene["name"]].files, strict=True):
            assert described["name"] == file.name and client.get(described["url"]).content == file.read_bytes()
        chapter = client.get(f"/inspector/book/{scene['chapter']}.md")
        assert chapter.status_code == 200 and chapter.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "says"),
    [
        ("", {"block_size": 5}, {}, 400, "Invalid enum value 5 - at `$.block_size`"),
        ("", {"num_kv_blocks": 0}, {}, 400, "Expected `int` >= 2 - at `$.num_kv_blocks`"),
        ("", {"num_kv_blocks": True}, {}, 400, "Expected `int`, got `bool`"),
        ("", {"enable_prefix_caching": 1}, {}, 400, "Expected `bool`, got `int`"),
        ("", {"model": "x"}, {}, 400, "unknown field `model`"),
        ("/prompts", {}, {}, 400, "prompts"),
        ("/prompts", {"prompts": []}, {}, 400, "length >= 1 - at `$.prompts`"),
        ("/prompts", {"prompts": ["a"], "max_tokens": 0}, {}, 400, "`int` >= 1 - at `$.max_tokens`"),
        ("/prompts", {"prompts": ["a"], "temperature": -1}, {}, 400, "temperature"),
        ("/prompts", {"prompts": ["a"], "best_of": 2}, {}, 400, "best_of"),
        ("/pace", {"delay": 99}, {}, 400, "`float` <= 2.0 - at `$.delay`"),
        ("/scene", {"scene": "none"}, {}, 400, "known are choose"),
        ("/nothing", {}, {}, 404, "Not Found"),
        ("/prompts", {"prompts": ["a"]}, {"Content-Type": "text/plain"}, 415, "application/json"),
        ("/prompts", {"prompts": ["a"]}, {"Origin": "http://evil.example"}, 403, "evil.example"),
        ("/prompts", {"prompts": ["a"]}, {"Host": "evil.example"}, 403, "--host evil.example"),
    ],
)
def test_what_is_refused(
    idle: TestClient, path: str, body: Any, headers: dict[str, str], status: int, says: str
) -> None:
    """Mistakes, and pages of others. The engine stays."""
    headers = {"Content-Type": "application/json"} | headers
    answer = idle.post(f"/inspector/playground{path}", content=json.dumps(body), headers=headers)
    assert answer.status_code == status and says in answer.json()["error"]["message"]


def test_replayed_files() -> None:
    files = [DATA / "m2.jsonl", DATA / "m3.jsonl"]
    with TestClient(replay_app(files, "127.0.0.1"), base_url="http://localhost:8001") as client:
        page = client.get("/inspector").text
        for i, file in enumerate(files):
            assert f'{{"name":"{file.name}","url":"inspector/recordings/{i}"}}' in page
            assert client.get(f"/inspector/recordings/{i}").content == file.read_bytes()
        for path in ("recordings/2", "recordings/x", "book/index.md", "book/..%2Fpyproject.md"):
            assert client.get(f"/inspector/{path}").status_code == 404
