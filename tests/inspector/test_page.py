"""The page as one file, in a notebook, from the command line; and the trace."""

from __future__ import annotations

import itertools
import json
import re
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest

from folovllm.apps.cli import main
from folovllm.apps.inspector import film, show
from folovllm.apps.inspector.lines import read
from folovllm.apps.inspector.page import inline_source, whole_page
from folovllm.apps.inspector.trace import DEVICE, ENGINE, POSTPROCESS, REQUESTS, SCHEDULE, Trace
from tests.helpers import tiny_checkpoint
from tests.inspector.browser import SAMPLES
from tests.m5.test_events import GREEDY, World, engine


def run(*arguments: str | Path) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in arguments])
    return int(end.value.code or 0)


def test_a_text_cannot_end_the_script() -> None:
    text = '{"title": "</script><script>alert(1)</script><!--"}\n'
    page = whole_page(inline_source([("</script>.jsonl", text)]))
    (said,) = re.findall(r'<script type="application/json" id="source">(.*?)</script>', page)
    assert json.loads(said) == {"kind": "inline", "recordings": [{"name": "</script>.jsonl", "text": text}]}


@pytest.mark.skipif(find_spec("IPython") is None, reason="needs IPython: the extra `notebooks`")
def test_a_film_is_a_notebooks_cell(tmp_path: Path) -> None:
    served, file, other = engine("m3"), tmp_path / "run.jsonl", tmp_path / "x"
    with film(served, "mine") as taken:
        served.generate([[1] * 9], GREEDY)
    file.write_text(taken.text)
    assert read(file).how == "closed" and not served.events.on
    for frame in (taken._repr_html_(), show(taken, file).data, show(served).data):
        (page,) = re.findall(r"<iframe srcdoc='(.*?)'", frame, re.S)
        assert "importmap" in unescape(page) and "folovllm recording" in unescape(page)
        assert 'sandbox="allow-scripts"' in frame, "what a model wrote cannot reach the notebook"
    other.write_text("no")
    for recordings, says in (((), "one recording, or two"), ((other,), "is no recording")):
        with pytest.raises(ValueError, match=says):
            show(*recordings)


@pytest.mark.parametrize("milestone", ["m3", "m6"])
def test_tracks_of_a_trace(milestone: str) -> None:
    world, trace = World(engine(milestone), 1), Trace()
    world.engine.subscribe(trace)
    for _ in range(60):
        world.turn()
    found = trace.events()
    spans = [e for e in found if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    for track in (SCHEDULE, DEVICE, POSTPROCESS):
        own = sorted((e for e in spans if (e["pid"], e["tid"]) == (ENGINE, track)), key=lambda e: e["ts"])
        assert len(own) in (world.engine.core.num_steps, world.engine.core.num_steps + 1)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.2 for a, b in itertools.pairwise(own)), "one after the other"
    named = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in spans} <= named
    counted = sum(e["args"]["tokens"] for e in spans if e["tid"] == SCHEDULE and e["pid"] == ENGINE)
    assert counted == sum(e.output.num_tokens for e in world.seen if type(e).__name__ == "StepBegan")


STATES = ("waiting", "running", "waiting (preempted)")


def test_a_request_in_a_trace_waits_runs_gives_way_and_runs() -> None:
    served, trace = engine("m3", num_kv_blocks=8), Trace()
    served.subscribe(trace)
    served.generate([[1] * 15, [2] * 15], GREEDY)
    second = [e for e in trace.events() if (e["pid"], e["tid"]) == (REQUESTS, max(trace._added)) and e["ph"] != "M"]
    phases = [e["name"] for e in sorted(second, key=lambda e: (e["ts"], -e.get("dur", 0))) if e["name"] in STATES]
    assert phases == ["waiting", "running", "waiting (preempted)", "running"]
    assert "preempted for generate-0" in {e["name"] for e in second}
    outer = [e for e in second if e["name"] == "running"]
    for e in (e for e in second if e["name"].startswith(("prefill", "decode"))):
        inside = (o["ts"] - 0.2 <= e["ts"] and e["ts"] + e["dur"] <= o["ts"] + o["dur"] + 0.2 for o in outer)
        assert any(inside), "spans of a track are nested"


def test_generate_records_and_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, trace = tmp_path / "run.jsonl", tmp_path / "run.json"
    words = (
        "generate",
        "abc",
        "de",
        "--raw",
        "--max-tokens",
        "3",
        "--model",
        str(tiny_checkpoint()),
        "--device",
        "cpu",
    )
    assert run(*words, "--no-use-tqdm", "--record", record, "--trace", trace) == 0
    plain = capsys.readouterr().out
    assert run(*words, "--no-use-tqdm", "--show-steps") == 0
    assert capsys.readouterr().out == plain
    found = read(record)
    assert found.how == "closed" and found.header["title"] == "run"
    assert json.loads(trace.read_text())["traceEvents"]


def test_inspect_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "run.html"
    assert run("inspect", SAMPLES / "m2.jsonl", SAMPLES / "m3.jsonl", "--html", page) == 0
    assert capsys.readouterr().out.strip() == str(page)
    (said,) = re.findall(r'id="source">(.*?)</script>', page.read_text())
    assert [each["name"] for each in json.loads(said)["recordings"]] == ["m2.jsonl", "m3.jsonl"]
