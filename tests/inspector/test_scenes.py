"""Scenes and Chinese in headless Chromium: how a scene plays, the page of the playground, and that no text is left in English."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from folovllm.apps.inspector.playground import Playground, Settings
from folovllm.apps.inspector.scenes import FOLDER, scenes
from folovllm.sample.sampler import Sampler, SamplingBatch
from folovllm.step.schedule import SamplingSpec
from tests.inspector.browser import DRAWN, HOST, SAMPLES, SHOWN, STATIC, TICK, Shown, shown, sse

pytestmark = pytest.mark.slow
PHONE = {"width": 390, "height": 844}
STRINGS = json.loads((STATIC / "strings.zh.json").read_text(encoding="utf-8"))
CHOICES = """
const {choose, float16s, gumbel, ranked} = await import("inspector/chances.js");
const {scores, scene} = inspector.lanes[0].recording;
const logits = scores.map((score) => float16s(score.logprobs));
const orders = logits.map(ranked);
const take = (i, settings) =>
  choose(logits[i], orders[i], gumbel(settings.seed, scores[i].position, logits[i].length), settings).winner;
return {
  logits: logits.map((row) => [...row]), positions: scores.map((score) => score.position), drawn: scores[0].info.drawn,
  chosen: it.map((settings, n) => take(n % 40, settings)), recorded: scores.map((_, i) => take(i, scene.sampling)),
};
"""
TELL_ALL = f"""
for (let at = 0; at < inspector.player.clock.length; at += it) {{
  inspector.player.go(at);
  await {DRAWN};
}}
const {{missing}} = await import("inspector/words.js");
return [...missing];
"""


@pytest.fixture
def here(browser: Any, request: pytest.FixtureRequest) -> Iterator[Shown]:
    """A page; a parameter is what its context has."""
    with shown(browser, **getattr(request, "param", {})) as page:
        yield page


def test_a_scene_plays_once_up_to_its_question(here: Shown) -> None:
    scene, page = scenes()["memory"], here.open("memory", "embed")
    ticks = "const {clock} = inspector.player; return it.map((at) => clock.tickOf(clock.recordings[0], at))"
    start, stop = here.run(ticks, [scene.start, scene.stop])
    assert start <= page.evaluate(TICK) < stop and not page.locator(".asks").is_visible()
    page.locator(".speed").select_option("30")
    page.wait_for_function(f"!inspector.player.playing && {TICK} === {stop}")
    page.locator(".asks").wait_for(state="visible")
    assert page.locator(".question").inner_text() == scene.words.question
    page.locator(".go-on").click()
    page.wait_for_function(f"{TICK} > {stop}")
    assert not page.locator(".asks").is_visible()


def test_a_link_to_a_moment_wins(here: Shown) -> None:
    page = here.open("memory", "t=30")
    assert page.evaluate(TICK) == 30 and not page.evaluate("inspector.player.playing")
    assert page.locator("a.chapter").get_attribute("href") == "../3_paged_kv/"
    assert not page.locator(".experts, .states").locator("visible=true").count()


@pytest.mark.parametrize("here", [{"viewport": PHONE}], indirect=True)
def test_the_first_screen_shows_what_a_scene_is_about(here: Shown) -> None:
    """On a phone, too, without scrolling."""
    for name, panel in {"chunks": ".timeline", "experts": ".experts", "states": ".states", "blocks": ".memory"}.items():
        page = here.open(name, "t=5")
        box, player = (page.locator(f"{it} canvas").first.bounding_box() for it in (panel, ".player"))
        assert box and player and box["y"] + box["height"] <= player["y"], name


@pytest.mark.parametrize(
    ("scene", "moment", "where", "says"),
    [
        ("experts", 46, ".experts .facts", "this step reads the weights of 12 of 48 experts"),
        ("states", 18, ".said", "begins as a copy of the snapshot after 32 tokens"),
        ("states", 18, ".states .facts", "5 of 6 snapshots"),
        ("offload", 49, ".states .facts", "6 blocks were evicted, and have a copy in host memory"),
        ("offload", 51, ".said", "5 blocks came back from host memory for D."),
    ],
)
def test_what_an_elective_does(here: Shown, scene: str, moment: int, where: str, says: str) -> None:
    assert says in here.open(scene, f"t={moment}").locator(where).inner_text()


def test_snapshots_stand_at_the_ends_of_cached_blocks(here: Shown) -> None:
    here.open("states")
    marked = here.run("""
      const {recording} = inspector.lanes[0];
      const marks = (state) => [...state.blocksWithSnapshots()].map((block) => block >= 0 && state.hash[block] !== null);
      return recording.moments.flatMap((_, at) => marks(recording.stateAt(at)))""")
    assert len(marked) > 100 and all(marked)


def test_the_page_takes_the_token_that_the_engine_takes(here: Shown) -> None:
    """For 200 random settings of the sliders, the engine's own sampler beside; and as recorded, all forty tokens of the engine."""
    random = np.random.default_rng(0)
    rows = [
        {
            "temperature": float(random.choice([0, 0.3, 0.7, 1, 1.3, 2])),
            "min_p": float(random.choice([0, random.random() / 2])),
            "top_k": int(random.choice([0, 1, random.integers(2, 40)])),
            "top_p": float(random.choice([1, random.uniform(0.05, 1)])),
            "seed": int(random.integers(2**53)),
        }
        for _ in range(200)
    ]
    here.open("choose", "t=40")
    found = here.run(CHOICES, rows)
    logits = torch.tensor(found["logits"])[torch.arange(200) % 40]
    positions = [found["positions"][i % 40] for i in range(200)]
    batch = SamplingBatch.from_specs([SamplingSpec(**row) for row in rows], positions, torch.device("cpu"))
    assert found["chosen"] == Sampler().sample(logits, batch).tolist()
    assert len(set(found["drawn"])) > 20 and found["recorded"] == found["drawn"]


@pytest.mark.parametrize("here", [{"viewport": PHONE}], indirect=True)
def test_sliders_by_keyboard(here: Shown) -> None:
    """A slider's keys are its own, and do not move the recording."""
    page = here.open("choose", "t=1")
    assert page.locator(".winner").inner_text() == "“␣girl” wins with 44.3%; greedy takes “␣boy”."
    page.locator("[name=temperature]").focus()
    page.keyboard.press("Home")
    page.evaluate(DRAWN)
    assert page.locator(".winner").inner_text().startswith("“␣boy” wins with 100.0%: the likeliest token")
    assert page.locator(".tokens tr").count() == 11 and page.locator(".tokens .cut").count() == 9
    assert page.evaluate(TICK) == 1
    page.locator("[name=seed]").fill("12.5")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Next seed").click()
    assert page.locator("[name=seed]").input_value() == "13"
    page.get_by_role("button", name="As recorded").click()
    page.evaluate(DRAWN)
    assert page.locator(".tokens .wins code").inner_text() == "␣girl"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_scene_plays_while_the_engine_loads(here: Shown) -> None:
    """It plays from its recording; the engine takes it over once it is there and somebody asks for it."""
    asked: dict[str, Any] = {}
    answers = iter(["PyTorch is imported (1 of 2)", None, None])
    told = Playground({}).described()

    def control(route: Any) -> None:
        if route.request.method != "POST":
            return route.fulfill(json=told | {"loading": next(answers)})
        body = json.loads(route.request.post_data)
        asked[route.request.url.removeprefix(f"{HOST}control")] = body
        if body.get("num_kv_blocks") == 40:
            return route.fulfill(status=400, json={"error": {"message": "40 blocks are too many"}})
        return route.fulfill(json=told | {"loading": None})

    def stream(route: Any) -> None:
        lines = (SAMPLES / "m3.jsonl").read_text(encoding="utf-8").splitlines()
        route.fulfill(body=sse(lines), content_type="text/event-stream")

    def recording(route: Any) -> None:
        name = route.request.url.removeprefix(f"{HOST}scenes/")
        route.fulfill(body=(FOLDER / name).read_bytes(), content_type="application/jsonl")

    listed = []
    for scene in scenes().values():
        links = [{"name": file.name, "url": f"scenes/{file.name}"} for file in scene.files]
        listed.append(msgspec.to_builtins(scene.described()) | {"recordings": links})
    source = {"kind": "playground", "events": "events", "control": "control", "book": None, "live": False}
    here.show(source | {"scenes": listed}, control=control, events=stream, scenes=recording)
    page = here.page
    page.wait_for_function(SHOWN)
    assert [kind.inner_text() for kind in page.locator(".kind > b").all()] == ["Start", "Memory", "Speed", "Electives"]
    page.wait_for_function("inspector.player.playing")
    assert page.locator("details.panel[open]").count() == 0
    page.wait_for_function("!document.querySelector('button.run').disabled")
    run, blocks = page.locator("button.run"), page.get_by_role("button", name="Blocks of sixteen and of one")
    assert run.inner_text() == "Run it on the engine"
    page.goto(f"{HOST}page?again#scene=drafts&t=7")
    page.wait_for_function(SHOWN)
    assert page.evaluate(TICK) == 7 and "four tokens" in page.locator(".watch").inner_text()
    blocks.click()
    page.wait_for_function("inspector.lanes.length === 2 && inspector.player.playing")
    assert "192 tokens" in page.locator(".watch").inner_text()
    page.wait_for_function("location.hash.includes('scene=blocks')")
    run.click()
    page.wait_for_function("inspector.lanes.length === 1 && inspector.player.live")
    assert asked["/scene"] == {"scene": "blocks"}
    page.evaluate("document.querySelector('details.panel').open = true")
    page.locator(".playground textarea").fill("One\n\nTwo")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="One step").click()
    fields = page.locator(".fields label")
    assert fields.count() == len(Settings.__struct_fields__)
    assert (fields.locator("select").count(), fields.locator("[type=checkbox]").count()) == (3, 6)
    fields.filter(has_text="max_num_batched_tokens").locator("input").press("ArrowRight")
    page.wait_for_timeout(300)
    assert asked[""] == {"max_num_batched_tokens": 72}, "the next stop of the slider"
    fields.filter(has_text="num_kv_blocks").locator("input").fill("40")
    page.wait_for_selector(".playground .error:not([hidden])")
    assert "40 blocks are too many" in page.locator(".playground .error").inner_text()
    assert asked["/prompts"] == {"prompts": ["One", "Two"], "max_tokens": 40, "temperature": 0.7}
    assert asked["/pace"] == {"paused": True, "step": 1}
    here.errors[:] = [error for error in here.errors if "400" not in error]  # as it should be


class TestChinese:
    @pytest.mark.parametrize("here", [{"locale": "zh-CN"}], indirect=True)
    def test_no_text_is_left_in_english(self, here: Shown) -> None:
        """Of all scenes; of M1 and slots, an abort, and overlap; of the controls, and what these say."""
        for name, scene in scenes().items():
            page = here.open(name, "t=0")
            assert here.run(TELL_ALL, 1 if len(scene.files) == 1 else 5) == [], name
            assert page.evaluate("document.documentElement.lang") == "zh"
            if scene.words.watch and len(scene.files) < 3:
                assert scene.zh.watch in page.locator(".watch").inner_text()
        for sample in ("m1", "m2", "m5", "m6"):
            here.open(f"{sample}.jsonl", "t=0")
            assert here.run(TELL_ALL, 1) == []
        check = """
          const {template} = await import("inspector/dom.js");
          const {missing} = await import("inspector/words.js");
          it.forEach((name) => template(name));
          return [...missing]"""
        assert here.run(check, ["playground", "player", "scenes", "requests", "timeline"]) == []
        assert {field["description"] for field in Playground({}).described()["fields"].values()} <= STRINGS.keys()

    def test_each_has_the_names_of_its_source(self) -> None:
        for english, chinese in STRINGS.items():
            names = [sorted(part.split("}")[0] for part in text.split("{")[1:]) for text in (english, chinese)]
            assert names[0] == names[1], english
