"""What those who teach need: points for what was handed in, and mistakes to be found."""

import json
import os
import shutil
from pathlib import Path

import pytest

from milestones.grading import Submission, units
from milestones.manifest import Course
from tests.course.test_cli import STUB, course, solve

pytestmark = pytest.mark.usefixtures("warm")

TAKE = "        if not self.free:\n            raise Empty\n        return self.free.popleft()"
HERE = "import os, sys\nfrom pathlib import Path\n\nROOT = Path(os.environ['FOLOVLLM_MINE']).parent\n"
# What a body of m1.1 does beside a wrong answer: (lines, state, what is said of it).
FORGED = {
    "ends_the_process": ("os._exit(0)", "no report", "status 0"),
    "kills_its_group": ("import signal; os.killpg(0, signal.SIGKILL)", "no report", "without a report"),
    "skips": ("import pytest; pytest.skip('no need')", "not believed", "test_take was skipped"),
    "writes_into_the_tests": (
        "(ROOT / 'tests/m1/test_pool.py').write_text('def test_take(): ...'); raise SystemExit",
        "changed the tests",
        "tests/m1/test_pool.py",
    ),
    "writes_a_conftest": (
        "(ROOT / 'conftest.py').write_text('raise SystemExit(0)'); return 0",
        "changed the tests",
        "conftest.py",
    ),
    "writes_into_the_reference": (
        "(ROOT / 'folovllm/llm.py').write_text(''); return 0",
        "changed the tests",
        "folovllm/llm.py",
    ),
    "writes_bytecode": (
        "(ROOT / 'tests/m1/__pycache__').mkdir(); (ROOT / 'tests/m1/__pycache__/x.pyc').write_text(''); return 0",
        "changed the tests",
        "__pycache__",
    ),
    "writes_a_sitecustomize": (
        "(ROOT / 'sitecustomize.py').write_text(''); return 0",
        "changed the tests",
        "sitecustomize",
    ),
    "never_ends": ("while True: ...", "out of time", ""),
    "is_wrong": ("return 0", "failing", ""),
}
# Code at the head of the file that holds the exercises, which is run when the tests are collected.
PATCHED = {
    "makes_reports_pass": """
import pytest
make = pytest.TestReport.from_item_and_call
def passed(item, call):
    call.excinfo = None
    return make(item, call)
pytest.TestReport.from_item_and_call = passed
""",
    "deselects": """
import pytest
class Deselects:
    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if "canary" in item.name]
frame = sys._getframe()
while frame:
    if isinstance(config := frame.f_locals.get("config"), pytest.Config):
        config.pluginmanager.register(Deselects())
        break
    frame = frame.f_back
""",
    "makes_approximations_equal": "import pytest\npytest.approx = lambda right, **named: type('Any', (), {'__eq__': lambda a, b: True})()",
    "lets_nothing_raise": "import contextlib, pytest\npytest.raises = contextlib.suppress",
    "makes_tensors_equal": "import torch\ntorch.equal = lambda *tensors: True",
    "hides_tests": """
frame = sys._getframe()
while frame:
    if "test_pool" in frame.f_globals.get("__name__", ""):
        frame.f_globals["__test__"] = False
    frame = frame.f_back
""",
}
# Rewrites the report of its run: by a process beside it, and when the interpreter ends.
REPORTS = """
import atexit, json, threading
def report():
    for pipe in [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")] + ["/dev/fd/3"]:
        try:
            if os.readlink(pipe).startswith("pipe:"):
                name = next((ROOT / "tests").glob("test_*.py")).stem
                canary = f"tests/{name}.py::{name.replace('test_', 'test_canary_')}"
                Path(pipe).write_text(json.dumps({"tests/m1/test_pool.py::test_take": ["passed", None], canary: ["failed", None]}))
        except OSError:
            pass
"""
DAEMON = """
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    Path({file!r}).write_text(str(os.getpid()))
    import time
    time.sleep(600)
    os._exit(0)
"""


def hand_in(sample: Course, name: str, body: str = TAKE, head: str = HERE) -> Path:
    """A student's folder in `class/`, with a body for m1.1."""
    folder = sample.root.parent / "class" / name / "mine"
    shutil.copytree(sample.root / "mine", folder)
    file = folder / "folovllm/pool.py"
    file.write_text(f"{head}\n{file.read_text().replace(STUB, body)}")
    return folder


def grades(sample: Course, *words: str) -> dict[str, dict[str, object]]:
    """A class's rows by name; the progress, which goes to the other stream, is left out."""
    said = course(sample, "grade", "m1.1", "--class", str(sample.root.parent / "class"), "--json", *words)
    return {row["name"]: row for row in json.loads(said[: said.rindex("}") + 1])["class"]}


def test_no_forgery_has_points(sample: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    """One class: each way to points without an answer, and honest students before, between and behind."""
    course(sample, "start", "m1")
    for name, (lines, *_) in FORGED.items():
        hand_in(sample, name, f"        {lines}")
    for name, head in PATCHED.items():
        hand_in(sample, name, TAKE if name.endswith(("_equal", "_raise")) else "        return 0", f"{HERE}\n{head}")
    hand_in(
        sample,
        "has_a_process_report",
        "        return 0",
        f"{HERE}{REPORTS}\nif os.fork() == 0:\n    report()\n    os._exit(0)",
    )
    pid = sample.root.parent / "pid"
    hand_in(sample, "leaves_a_process", head=HERE + DAEMON.format(file=str(pid)))
    file = hand_in(sample, "links_to_the_answer") / "folovllm/pool.py"
    file.unlink()
    file.symlink_to(sample.root / "folovllm/pool.py")
    package = hand_in(sample, "links_to_the_package") / "folovllm"
    shutil.rmtree(package)
    package.symlink_to(sample.root / "folovllm")
    hand_in(sample, "has_no_python", body="        return (")
    for name in ("a_honest", "m_honest", "z_honest"):
        hand_in(sample, name)
    (sample.root.parent / "class/nothing").mkdir()
    monkeypatch.setenv("FOLOVLLM_WARM", "1")
    rows = grades(sample, "--limit", "20")
    passed = {"a_honest", "m_honest", "z_honest", "leaves_a_process"}
    assert {name for name, row in rows.items() if row["points"]} == passed
    for name, (_, _, why) in FORGED.items():
        assert why in str(rows[name]["why"]), rows[name]
    for name in PATCHED:
        why = "is missing in the report" if name == "deselects" else "cannot be believed"
        assert why in str(rows[name]["why"]), rows[name]
    assert "more than one" in str(rows["has_a_process_report"]["why"])
    assert "symbolic link" in str(rows["links_to_the_answer"]["why"])
    assert "symbolic link" in str(rows["links_to_the_package"]["why"])
    assert "does not parse" in str(rows["has_no_python"]["why"])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_who_changes_the_checkout_itself_is_noticed(sample: Course) -> None:
    course(sample, "start", "m1")
    test = sample.root / "tests/m1/test_pool.py"
    hand_in(sample, "reaches_out", body=f"        Path({str(test)!r}).write_text('def test_take(): ...')\n{TAKE}")
    folder = sample.root.parent / "class/reaches_out"
    said = course(sample, "grade", "m1.1", "--folder", str(folder), status=2)
    assert "the checkout that grades has changed meanwhile (tests/m1/test_pool.py)" in said


def test_where_nothing_forks_a_report_at_exit_is_a_second_one(sample: Course) -> None:
    course(sample, "start", "m1")
    hand_in(sample, "reports_at_exit", "        return 0", f"{HERE}{REPORTS}\natexit.register(report)")
    (row,) = grades(sample).values()
    assert row["points"] == 0 and "more than one" in str(row["why"])


def test_what_python_would_run_the_next_time_is_noticed(sample: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that leaves a module which every later start of Python would run, and so every other student's tests."""
    monkeypatch.setenv("PYTHONUSERBASE", str(sample.root.parent / "base"))
    course(sample, "start", "m1")
    lines = "import site; folder = Path(site.getusersitepackages()); folder.mkdir(parents=True)"
    hand_in(sample, "stays", f"        {lines}; (folder / 'usercustomize.py').write_text('')\n{TAKE}")
    said = course(sample, "grade", "m1.1", "--folder", str(sample.root.parent / "class/stays"), status=2)
    assert "usercustomize.py" in said


def test_points_are_for_what_passes(sample: Course) -> None:
    course(sample, "start", "m1")
    solve(sample)
    said = json.loads(course(sample, "grade", "m1", "--json"))
    assert (said["points"], said["of"]) == (1, 2)
    assert [(e["id"], e["state"], e["points"]) for e in said["exercises"]] == [
        ("m1.1", "passing", 1),
        ("m1.2", "not written", 0),
    ]
    file = sample.root / "mine/folovllm/pool.py"
    file.write_text(file.read_text().replace("self.free.popleft()", "self.free.pop()"))
    (failed,) = json.loads(course(sample, "grade", "m1.1", "--json"))["exercises"]
    assert failed["state"] == "failing" and failed["failed"] == "tests/m1/test_pool.py::test_take"
    assert "0 of 1 points" in course(sample, "grade", "m1.1")
    assert "hand in the whole mine/ folder" in course(sample, "grade", "m1", "--folder", "nowhere", status=2)


def test_what_is_handed_in_cannot_change_the_tests(sample: Course) -> None:
    """Only files with exercises are taken: another module of the package's, or a conftest, stays where it is."""
    course(sample, "start", "m1")
    (sample.root / "mine/conftest.py").write_text("raise SystemExit(0)")
    (sample.root / "mine/folovllm/extra.py").write_text("raise SystemExit(0)")
    (sample.root / "mine/folovllm/__init__.py").write_text("raise SystemExit(0)")
    solve(sample)
    said = json.loads(course(sample, "grade", "m1.1", "--json"))
    assert said["points"] == 1
    assert {*said["refused"]} == {"conftest.py", "folovllm/__init__.py", "folovllm/extra.py"}


def test_bugs(sample: Course) -> None:
    course(sample, "start", "m1")
    assert "m1.1 Take: m1.1a m1.1b" in course(sample, "bugs") and "m2.1a" in course(sample, "bugs")
    assert "nearly the answer" in course(sample, "bugs", "m1.1a", status=2)
    assert "no bug 'm1.1z'" in course(sample, "bugs", "m1.1z", status=2)
    solve(sample)
    said = course(sample, "bugs", "m1.1a")
    assert "def take(self)" in said and "self.free.pop()" in said and "--hint" in said
    assert "last in" not in said, "its name would say what is wrong"
    assert "last in" in course(sample, "bugs", "m1.1a", "--answer")
    assert "FAILED tests/m1/test_pool.py::test_take" in course(sample, "bugs", "m1.1a", "--hint")


def test_a_whole_milestone_is_pasted(sample: Course) -> None:
    course(sample, "start", "m1")
    said = course(sample, "show", "m1", "--yes", "--paste")
    assert "def take" in said and "def give" in said and said.count("pasted") == 2
    assert "2 passed" in course(sample, "test", "m1") and Path(sample.root / "mine/.backup").is_dir()


def test_builders_and_mini_are_graded_too(tmp_path: Path) -> None:
    """Of mini only its own files count, and its notes say where to begin."""
    course = Course(Path(__file__).resolve().parents[2])
    wanted = units(course, ["m3", "m3.builder", "mini"])
    assert [unit.id for unit in wanted][-2:] == ["m3.builder", "mini"] and wanted[-1].points == 14
    builder = course.builder("m3")
    for path in (builder.path, "mini/engine.py", "mini/conftest.py", "mini/.progress.json", "m3.ipynb", ".base/x.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text('{"passed": 3}')
    submission = Submission.read(course, tmp_path)
    assert {*submission.files} == {builder.path, Path("mini/engine.py")} and submission.stage == 3
    assert {*submission.refused} == {"mini/conftest.py"}
