"""Scenes and Chinese in headless Chromium: how a scene plays, the page of the playground, and that no text is left in English."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from folovllm.apps.inspector.page import inline_source, whole_page
from folovllm.apps.inspector.playground import CONTROLS
from folovllm.apps.inspector.scenes import Scene, scenes
from folovllm.sample.sampler import Sampler, SamplingBatch
from folovllm.step.schedule import SamplingSpec
from tests.inspector.browser import DRAWN, HOST, SAMPLES, SHOWN, STATIC, Shown, show_source, shown, sse

pytestmark = pytest.mark.slow
TICK = "inspector.player.clock.tick"
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
for (let at = 0; at < inspector.player.clock.length; at += 1 + it) {{
  inspector.player.go(at);
  await {DRAWN};
}}
const {{missing}} = await import("inspector/words.js");
return [...missing];
"""


def opened(here: Shown, files: list[Path], folder: Path, options: str = "") -> Any:
    """Show recordings as one file. Returns Playwright's page."""
    texts = [(file.name, file.read_text(encoding="utf-8")) for file in files]
    (file := folder / f"{files[0].stem}.html").write_text(whole_page(inline_source(texts, "../{}/")), encoding="utf-8")
    here.page.goto(f"{file.as_uri()}#{options}")
    here.page.wait_for_function(SHOWN)
    return here.page


class TestPlaying:
    def test_it_plays_once_up_to_its_question(self, browser: Any, tmp_path: Path) -> None:
        scene = scenes()["memory"]
        with shown(browser) as here:
            page = opened(here, scene.files, tmp_path, "embed")
            start, stop = here.run(
                "const {clock} = inspector.player; return it.map((at) => clock.tickOf(clock.recordings[0], at))",
                [scene.start, scene.stop],
            )
            assert start <= page.evaluate(TICK) < stop and not page.locator(".asks").is_visible()
            page.locator(".speed").select_option("30")
            page.wait_for_function(f"!inspector.player.playing && {TICK} === {stop}")
            page.locator(".asks").wait_for(state="visible")
            assert page.locator(".question").inner_text() == scene.words.question
            page.locator(".go-on").click()
            page.wait_for_function(f"{TICK} > {stop}")
            assert not page.locator(".asks").is_visible()


PANELS = {  # scene: a moment, and what a part of the page says then
    "memory": (30, "a.chapter", "Read its chapter"),
    "states": (18, ".said", "begins as a copy of the snapshot after 32 tokens"),
    "offload": (49, ".states .facts", "6 blocks were evicted, and have a copy in host memory"),
    "experts": (46, ".experts .facts", "this step reads the weights of "),
}


@pytest.mark.parametrize("name", PANELS)
def test_what_a_panel_says(browser: Any, name: str, tmp_path: Path) -> None:
    """At the moment that a link names; the recording does not play on."""
    moment, panel, says = PANELS[name]
    with shown(browser) as here:
        page = opened(here, scenes()[name].files, tmp_path, f"t={moment}")
        assert says in page.locator(panel).inner_text()
        assert page.evaluate(TICK) == moment and not page.evaluate("inspector.player.playing")


class TestChoice:
    def test_the_page_takes_the_token_that_the_engine_takes(self, browser: Any, tmp_path: Path) -> None:
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
        with shown(browser) as here:
            opened(here, scenes()["choose"].files, tmp_path, "t=40")
            found = here.run(CHOICES, rows)
        specs = [SamplingSpec(**row) for row in rows]
        logits = torch.tensor(found["logits"])[torch.arange(200) % 40]
        positions = [found["positions"][i % 40] for i in range(200)]
        batch = SamplingBatch.from_specs(specs, positions, torch.device("cpu"))
        assert found["chosen"] == Sampler().sample(logits, batch).tolist()
        assert len(set(found["drawn"])) > 20 and found["recorded"] == found["drawn"]


class TestPlayground:
    def test_a_scene_plays_while_the_engine_loads(self, browser: Any) -> None:
        """It plays from its recording; the engine takes it over once it is there and somebody asks for it."""
        asked: list[tuple[str, Any]] = []
        answers = iter(["PyTorch is imported (1 of 2)", None, None])
        fields = [control.described(name, control.default) for name, control in CONTROLS.items()]
        told: dict[str, Any] = {"fields": fields, "mine": 0, "error": None, "delay": 0.2, "paused": 0}

        def control(route: Any) -> None:
            if route.request.method == "POST":
                asked.append((route.request.url.removeprefix(f"{HOST}control"), json.loads(route.request.post_data)))
                if asked[-1][1].get("num_kv_blocks") == 40:
                    return route.fulfill(status=400, json={"error": {"message": "40 blocks are too many"}})
                return route.fulfill(json=told | {"loading": None})
            return route.fulfill(json=told | {"loading": next(answers)})

        def stream(route: Any) -> None:
            lines = (SAMPLES / "m3.jsonl").read_text(encoding="utf-8").splitlines()
            route.fulfill(body=sse(lines), content_type="text/event-stream")

        listed = [
            msgspec.to_builtins(scene.described()) | {"recordings": recordings(scene)} for scene in scenes().values()
        ]
        source = {"kind": "playground", "events": "events", "control": "control", "book": None, "live": False}
        with shown(browser) as here:
            for scene in scenes().values():
                here.recordings |= {f"scenes/{file.name}": file.read_text(encoding="utf-8") for file in scene.files}
            routes = {"control*": control, "control/*": control, "events": stream}
            show_source(here, source | {"scenes": listed}, routes)
            here.page.wait_for_function(SHOWN)
            run = here.page.locator("button.run")
            kinds = [kind.inner_text() for kind in here.page.locator(".kind > b").all()]
            assert kinds == ["Start", "Memory", "Speed", "Electives"]
            here.page.wait_for_function("inspector.player.playing")
            assert here.page.locator("details.panel[open]").count() == 0
            here.page.wait_for_function("!document.querySelector('button.run').disabled")
            assert run.inner_text() == "Run it on the engine"
            here.page.get_by_role("button", name="Blocks of sixteen and of one").click()
            here.page.wait_for_function("inspector.lanes.length === 2")
            assert "192 tokens" in here.page.locator(".watch").inner_text()
            here.page.wait_for_function("location.hash.includes('scene=blocks') && inspector.player.playing")
            here.page.goto(f"{HOST}live.html?again#scene=drafts&t=7")
            here.page.wait_for_function(SHOWN)
            assert here.page.evaluate(TICK) == 7 and "four tokens" in here.page.locator(".watch").inner_text()
            here.page.get_by_role("button", name="Blocks of sixteen and of one").click()
            here.page.wait_for_function("inspector.lanes.length === 2 && inspector.player.playing")
            run.click()
            here.page.wait_for_function("inspector.lanes.length === 1 && inspector.player.live")
            assert ("/scene", {"scene": "blocks"}) in asked
            here.page.evaluate("document.querySelector('details.panel').open = true")
            here.page.locator(".playground textarea").fill("One\n\nTwo")
            here.page.get_by_role("button", name="Send").click()
            here.page.get_by_role("button", name="One step").click()
            here.page.locator(".fields label:has-text('num_kv_blocks') input").fill("40")
            here.page.wait_for_selector(".playground .error:not([hidden])")
            assert "40 blocks are too many" in here.page.locator(".playground .error").inner_text()
            assert dict(asked)["/prompts"] == {"prompts": ["One", "Two"], "max_tokens": 40, "temperature": 0.7}
            assert dict(asked)["/pace"] == {"paused": True, "step": 1}
            here.errors[:] = [error for error in here.errors if "400" not in error]  # as it should be


def recordings(scene: Scene) -> list[dict[str, str]]:
    return [{"name": file.name, "url": f"scenes/{file.name}"} for file in scene.files]


class TestChinese:
    def test_no_text_of_a_scene_is_left_in_english(self, browser: Any, tmp_path: Path) -> None:
        with shown(browser, locale="zh-CN") as here:
            for name, scene in scenes().items():
                page = opened(here, scene.files, tmp_path, "t=0")
                assert here.run(TELL_ALL, 0 if len(scene.files) == 1 else 4) == [], name
                assert page.evaluate("document.documentElement.lang") == "zh"
                if scene.words.watch and len(scene.files) < 3:
                    assert scene.zh.watch in page.locator(".watch").inner_text()

    def test_no_other_text_is(self, browser: Any, tmp_path: Path) -> None:
        """M1 and slots; an abort; overlap; the controls, and what these say."""
        with shown(browser, locale="zh-CN") as here:
            for sample in ("m1", "m2", "m5", "m6"):
                opened(here, [SAMPLES / f"{sample}.jsonl"], tmp_path, "t=0")
                assert here.run(TELL_ALL, 0) == []
            check = """
              const {template} = await import("inspector/dom.js");
              const {missing} = await import("inspector/words.js");
              it.forEach((name) => template(name));
              return [...missing]"""
            assert here.run(check, ["playground", "player", "scenes", "requests", "timeline"]) == []
        assert {control.help for control in CONTROLS.values()} <= STRINGS.keys()

    def test_each_has_the_names_of_its_source(self) -> None:
        for english, chinese in STRINGS.items():
            names = [sorted(part.split("}")[0] for part in text.split("{")[1:]) for text in (english, chinese)]
            assert names[0] == names[1], english
