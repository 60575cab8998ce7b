"""What the page shows and how it is steered, in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from folovllm.apps.inspector.page import inline_source
from folovllm.apps.inspector.recorder import recording
from tests.inspector.browser import DRAWN, SAMPLES, SHOWN, STATIC, TICK, Shown, lines_of, shown, sse
from tests.m5.test_events import World, engine

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
GUESSES = ROOT / "docs" / "assets" / "recordings" / "x3_guesses.jsonl"
MOST_LINES = 3650  # with the scene of a choice
LAST = "inspector.player.clock.length - 1"
SETTLED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
TELL_ALL = f"""
const told = [];
for (let at = 0; at < inspector.player.clock.length; at++) {{
  inspector.player.go(at);
  await {DRAWN};
  told.push(inspector.lanes[0].text);
}}
return told;
"""


@pytest.fixture
def here(browser: Any) -> Iterator[Shown]:
    with shown(browser) as page:
        yield page


def key(here: Shown, *names: str) -> int:
    """Press keys; returns where the page stands then."""
    for name in names:
        here.page.keyboard.press(name)
    here.page.evaluate(SETTLED)
    return int(here.page.evaluate(TICK))


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A recording of 1,501 turns."""
    world = World(engine("m3"), 1)
    world.compare = lambda: None  # type: ignore[method-assign]
    with recording(world.engine, file := tmp_path / "long.jsonl"):
        for _ in range(1_500):
            world.turn()
    text = file.read_text()
    file.write_text(text[: text.index('["Turn",1501,')])  # aborts are turns, too
    return file


def test_the_page_stays_small() -> None:
    files = [file for file in STATIC.iterdir() if file.suffix in (".js", ".css", ".html")]
    lines = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert sum(lines.values()) <= MOST_LINES, lines


@pytest.mark.parametrize("name", ["m3.jsonl", "m5.jsonl"])
def test_every_moment_has_its_sentences(here: Shown, name: str) -> None:
    """What is preempted, refused, found, evicted, finished or aborted is said, with names and numbers."""
    here.open(name)
    told = here.run(TELL_ALL)
    names = dict(here.run("return [...inspector.lanes[0].recording.infos].map(([id, info]) => [id, info.letters])"))
    turns = [line[3] for line in lines_of(name)[1:] if line[0] == "Turn"]
    assert len(told) == len(turns) and all(len(text) > 12 for text in told)
    for text, events in zip(told[1:], turns[1:], strict=True):
        for kind, first, *fields in events:
            who = names.get(first)
            match kind:
                case "Preempted" if first != fields[0]:
                    assert f"{who} was preempted for {names[fields[0]]}; {fields[1]} token" in text
                case "PrefixHit":
                    assert f"its first {fields[0]} tokens were in the cache" in text
                case "BlockEvicted":
                    assert str(first) in text and "cached contents" in text
                case "Finished":
                    assert f"{who} finished" in text
                case "Aborted":
                    assert f"{who} was aborted from outside." in text
                case "RequestAdded":
                    assert f"{who} came: {len(fields[2])} token" in text or " came, and wait." in text


def test_accepted_bonus_and_rejected_tokens(here: Shown) -> None:
    """In the row of a request: marked by what they are, in the order of the text, and counted. (`test_reducer.py` has every moment.)"""
    here.open([GUESSES], "t=4")
    rows = here.run("""
      const marks = (row) => [...row.querySelectorAll(".newest > *")].map((e) => `${e.tagName} ${e.title.split(":")[0]}${e.textContent}`);
      return [...document.querySelectorAll(".running .pick")].map((row) => [row.querySelector(".what").innerText, ...marks(row)])""")
    first, second = rows
    assert first[:2] == ["4 of 40 generated, 0 of 12 draft tokens accepted", "MARK bonusoo"]
    assert first[2:] == ["DEL rejecteder", "DEL rejectedo", "DEL rejected.", "DEL rejected One"]
    assert second[:3] == ["6 of 56 generated, 2 of 12 draft tokens accepted", "INS accepted from", "MARK bonus her"]
    assert second[3:] == ["DEL rejected his", "DEL rejected hands", "DEL rejected and"]


def test_keys(here: Shown) -> None:
    here.open("m3.jsonl")
    last = here.page.evaluate(LAST)
    assert key(here, "End") == last and key(here, "ArrowRight") == last
    assert key(here, "Home") == 0 and key(here, "ArrowLeft") == 0
    assert key(here, "ArrowRight", "ArrowRight") == 2 and key(here, "Shift+ArrowRight") == 12
    flags = here.run("return inspector.lanes[0].recording.columns.flags")
    preempted = [at for at, bits in enumerate(flags) if bits & 1]
    assert [key(here, "Home", "p"), key(here, "p")] == preempted[:2] and key(here, "Shift+P") == preempted[0]
    key(here, "End")
    assert key(here, "Space") == 0 and here.run("return inspector.player.playing"), "from the beginning again"
    key(here, "Space")
    assert not here.run("return inspector.player.playing")


def test_a_link_to_a_moment(here: Shown) -> None:
    here.open("m5.jsonl", "t=17")
    assert here.page.evaluate(TICK) == 17
    key(here, "ArrowRight")
    here.page.wait_for_function("location.hash === '#t=18'")
    here.page.goto(here.page.url.replace("#t=18", "#t=5"))
    here.page.wait_for_function(f"{TICK} === 5")


def test_a_race_has_one_clock(here: Shown) -> None:
    here.open([SAMPLES / "m2.jsonl", SAMPLES / "m3.jsonl"])
    stand = """
      const {clock} = inspector.player;
      return inspector.lanes.map(({recording, frame}) => [frame.at, recording.columns.time, clock.time])"""
    for presses in ("ArrowRight",) * 5, ("Shift+ArrowRight",) * 3, ("ArrowLeft",), ("End",):
        key(here, *presses)
        for at, times, now in here.run(stand):
            assert times[at] <= now and (at + 1 == len(times) or times[at + 1] > now)
    assert all(at + 1 == len(times) for at, times, _ in here.run(stand))
    assert here.page.locator(".lane .memory canvas").count() == 2


def test_blocks_by_keyboard(here: Shown) -> None:
    here.open("m5.jsonl", "t=10")
    here.page.locator(".memory canvas").focus()
    key(here, "ArrowRight", "ArrowRight", "ArrowLeft")
    tip = here.page.locator(".memory .tip").inner_text()
    assert tip.startswith("Block 0: shared") and "Once upon a time" in tip and "begins a prefix" in tip
    key(here, "ArrowDown", "Enter")
    assert here.page.locator(".pick[aria-pressed=true]").count() == 1


def test_what_it_does_not_read_is_refused_by_name(here: Shown) -> None:
    for text, says in (
        ('{"format": "folovllm recording", "version": 99}\n', "version 99"),
        ('{"format": "cooking recipe"}\n', "This is no recording"),
        ('["Turn", 0, 0, []]\n', "This is no recording"),
        ("", "empty"),
    ):
        here.show(inline_source([("odd.jsonl", text)]))
        here.page.wait_for_selector(".error")
        assert says in here.page.locator(".error").inner_text()


def test_a_file_that_is_fetched_and_was_cut_off(here: Shown) -> None:
    text = (SAMPLES / "m3.jsonl").read_text(encoding="utf-8")
    cut = text[: len(text) * 2 // 3]
    source = {"kind": "files", "recordings": [{"name": "cut.jsonl", "url": "cut.jsonl"}]}
    here.show(source, cut=lambda route: route.fulfill(body=cut, content_type="application/jsonl"))
    here.page.wait_for_function(SHOWN)
    assert here.page.evaluate(LAST) == sum(line.startswith('["Turn"') for line in cut.split("\n")[:-1]) - 1


def test_a_stream_with_a_key(here: Shown) -> None:
    """It is asked for with the key; what comes is shown as it comes, and a new header begins anew."""
    lines = (SAMPLES / "m5.jsonl").read_text(encoding="utf-8").splitlines()
    asked: list[Any] = []

    def stream(route: Any) -> None:
        asked.append(route.request.headers.get("authorization"))
        if asked[-1] != "Bearer right":
            return route.fulfill(status=401, json={})
        return route.fulfill(body=": hello\n\n" + sse(lines[: 30 * len(asked)]), content_type="text/event-stream")

    here.show({"kind": "live", "events": "events", "needs_key": True}, events=stream)
    here.page.locator("input[type=password]").fill("wrong")
    here.page.keyboard.press("Enter")
    here.page.wait_for_function("document.querySelector('input[type=password]')?.value === ''")  # asked again
    here.page.locator("input[type=password]").fill("right")
    here.page.keyboard.press("Enter")
    here.page.wait_for_function(SHOWN)
    here.page.wait_for_function(f"{LAST} > 40 && {TICK} === {LAST}")
    key(here, "ArrowLeft")
    assert not here.run("return inspector.player.follows")
    assert key(here, "f") == here.page.evaluate(LAST)
    here.errors[:] = [error for error in here.errors if "401" not in error]  # as it should be


def test_a_view_that_stays_for_days_forgets(here: Shown, long: Path) -> None:
    """The oldest moments go, up to a keyframe; those that are left are as they were, and nothing leads behind them."""
    here.open([long], "t=1500")
    found = here.run("""
      const {recording} = inspector.lanes[0];
      const told = (at) => JSON.stringify([...recording.stateAt(at).sequences.values()]);
      const before = [1400, 1499, 1200].map(told);
      const size = recording.size;
      recording.forget(size / 2);
      const after = [1400, 1499, 1200].map(told);
      inspector.player.go(0);
      const infos = [...recording.infos.values()];
      return {
        same: JSON.stringify(before) === JSON.stringify(after), first: recording.first, left: recording.size / size,
        at: inspector.player.clock.tick, added: recording.find("add", recording.first, -1),
        gone: infos.every((info) => info.end >= recording.first), known: recording.moments.filter(Boolean).length,
      };""")
    assert found["same"] and found["gone"] and found["added"] is None
    assert found["first"] % 256 == 0 and found["at"] == found["first"] > 500
    assert found["left"] < 0.5 and found["known"] == 1501 - found["first"]
    here.page.evaluate(SETTLED)


def test_everything_has_a_name(here: Shown) -> None:
    here.open("m5.jsonl", "t=20")
    nameless = here.run("""
      return [...document.querySelectorAll("button, input, select, canvas:not([aria-hidden])")]
        .filter((e) => e.offsetParent && !e.hidden && !(e.getAttribute("aria-label") || e.innerText || e.labels?.length))
        .map((e) => e.outerHTML)""")
    assert nameless == []
    assert here.page.locator(".story[aria-live=polite]").count() == 1
    label = here.page.locator(".memory canvas").get_attribute("aria-label")
    assert "owned" in label and "cached" in label
