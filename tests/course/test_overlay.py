"""The learner's file is the one that runs, wherever Python is started from, or the session says that it is not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from milestones.manifest import Course
from milestones.mine import Mine

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mine(sample: Course) -> Mine:
    mine = Mine.of(sample)
    mine.start("m1")
    mine.start("m2")
    for exercise in sample.exercises:
        mine.paste(exercise)
    return mine


def run(*command: str, cwd: Path, path: Path | None, **variables: str) -> tuple[int, str]:
    """A child that finds the package in `path` first; returns its status and what it printed."""
    kept = {k: v for k, v in os.environ.items() if k not in ("FOLOVLLM_MINE", "PYTHONPATH")}
    paths = {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])} if path else {}
    environment = {**kept, **paths, "TRITON_INTERPRET": "1", **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def run_pytest(mine: Mine, *words: str, cwd: Path | None = None, **variables: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return run(*command, cwd=cwd or mine.course.root, path=mine.course.root, **variables)


def spoil(mine: Mine) -> None:
    """From here on, the learner's `take` is recognisably another."""
    file = mine.folder / "folovllm" / "pool.py"
    file.write_text(file.read_text().replace("self.free.popleft()", "self.free.pop()"))


def test_pytest(mine: Mine) -> None:
    status, said = run_pytest(mine, "--mine")
    assert status == 0, said
    assert "mine (2 of 2 m1 exercises written, 2 of 2 m2 exercises written)" in said
    spoil(mine)
    status, said = run_pytest(mine, "--mine", "tests/m1")
    assert status == 1 and "m1.1 Pool.take  failing  mine/folovllm/pool.py:16  python -m milestones hint m1.1" in said
    status, said = run_pytest(mine)
    assert status == 0 and "testing: the reference" in said


def test_unwritten_exercises_fail_with_their_own_id(mine: Mine) -> None:
    mine.reset(mine.course.exercise("m1.1"))
    mine.reset(mine.course.exercise("m2.2"))  # a kernel: the interpreter wraps what it raises
    status, said = run_pytest(mine, "--mine")
    assert status == 1 and "2 of 2 m" not in said and "Traceback" not in said
    assert "m1.1 Pool.take  not written  mine/folovllm/pool.py:16" in said
    assert "m2.2 double  not written  mine/folovllm/kernel.py:9" in said


def test_xdist(mine: Mine) -> None:
    assert run_pytest(mine, "--mine", "-n2")[0] == 0
    mine.reset(mine.course.exercise("m1.1"))
    status, said = run_pytest(mine, "--mine", "-n2", "tests/m1")
    assert status == 1 and "m1.1 Pool.take  not written" in said


def test_from_another_folder(mine: Mine, tmp_path: Path) -> None:
    spoil(mine)
    assert run_pytest(mine, "--mine", str(mine.course.root), cwd=tmp_path)[0] == 1
    (mine.folder / "deep").mkdir()
    _, said = run(sys.executable, "-m", "folovllm", "--mine", cwd=mine.folder / "deep", path=mine.course.root)
    assert said.strip() == str(mine.folder / "folovllm/pool.py")


def test_a_marker_of_its_own_goes_before_the_folders(mine: Mine) -> None:
    with (mine.course.root / "tests/m1/test_pool.py").open("a") as file:
        file.write("\n\n@pytest.mark.m2\ndef test_share():\n    Pool(2).share(1)\n")
    _, said = run_pytest(mine, "-q", "-m", "m1", "--collect-only")
    assert "2/3 tests collected" in said
    _, said = run_pytest(mine, "-q", "-m", "m2", "--collect-only")
    assert "3/5 tests collected" in said and "tests/m1/test_pool.py::test_share" in said


def test_another_milestones_file_is_read_only_for_a_marker_by_hand(mine: Mine) -> None:
    file = mine.course.root / "tests/m2/test_share.py"
    file.write_text("raise SystemExit('read')")
    status, said = run_pytest(mine, "-q", "-m", "m1")
    assert status == 0 and "2 passed" in said, said
    file.write_text("import pytest\n\n\n@pytest.mark.m1\ndef test_by_hand():\n    pass\n")
    assert "3 passed" in run_pytest(mine, "-q", "-m", "m1")[1]


def test_slow_ones_are_run_when_they_are_asked_for(mine: Mine) -> None:
    with (mine.course.root / "tests/m1/test_pool.py").open("a") as file:
        file.write("\n\n@pytest.mark.slow\ndef test_slow():\n    pass\n")
    assert "2 passed, 1 deselected" in run_pytest(mine, "-q", "-m", "m1")[1]
    assert "3 passed" in run_pytest(mine, "-q", "-m", "m1", "--slow")[1]
    assert "3 passed" in run_pytest(mine, "-q", "tests/m1/test_pool.py")[1]


def test_no_mine_is_an_error(mine: Mine) -> None:
    shutil.rmtree(mine.folder)
    status, said = run_pytest(mine, "--mine")
    assert status == 4 and "python -m milestones start m1" in said and "passed" not in said
    status, said = run(
        sys.executable, "-c", "import folovllm", cwd=ROOT, path=mine.course.root, FOLOVLLM_MINE="nowhere"
    )
    assert status == 1 and "no nowhere/folovllm here or above" in said


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    status, said = run(sys.executable, "-m", "folovllm", cwd=tmp_path, path=ROOT, FOLOVLLM_MINE=str(tmp_path / "nope"))
    assert status and f"{tmp_path / 'nope'}/folovllm" in said and "unset FOLOVLLM_MINE" in said.splitlines()[-1]


def test_a_hint_before_the_start_is_no_start(mine: Mine) -> None:
    shutil.rmtree(mine.folder / "folovllm")
    status, said = run_pytest(mine, "--mine")
    assert status == 4 and "python -m milestones start m1" in said and "Traceback" not in said


def test_yesterdays_files_say_update(mine: Mine) -> None:
    """One sentence where a module that they import is gone; no page of errors from collecting tests."""
    pool = mine.course.root / "folovllm" / "pool.py"
    pool.write_text(pool.read_text().replace("Empty", "Exhausted"))
    told = "the reference has changed since {} was copied: python -m milestones update"
    status, said = run_pytest(mine, "--mine")
    assert status == 4 and told.format(mine.folder / "folovllm/pool.py") in said and "Traceback" not in said
    for words, variables in (
        (["-m", "folovllm", "--mine"], {}),
        (["-c", "import folovllm"], {"FOLOVLLM_MINE": "mine"}),
    ):
        status, said = run(sys.executable, *words, cwd=mine.course.root, path=mine.course.root, **variables)
        assert status == 1 and told.format(mine.folder / "folovllm/pool.py") in said.splitlines()[-1]
    run(sys.executable, "-m", "milestones", "update", cwd=mine.course.root, path=mine.course.root)
    assert "was copied" not in run_pytest(mine, "--mine", "-q")[1]


def test_a_file_that_is_gone_is_no_false_green(mine: Mine) -> None:
    (mine.folder / "folovllm" / "kernel.py").unlink()
    for words in ([], ["-n2"]):
        status, said = run_pytest(mine, "--mine", *words)
        assert status == 1 and "2 of 2 m1 exercises written, 1 of 2 m2 exercises written" in said
        assert "folovllm/kernel.py is missing from mine/: `python -m milestones start m2` brings it back" in said
    assert run_pytest(mine, "--mine", "-m", "m1")[0] == 0
    cell = "from milestones import notebooks; notebooks.running('m2')"
    _, said = run(sys.executable, "-c", cell, cwd=mine.folder, path=mine.course.root)
    assert said.startswith("running: yours (1 of 2)\nnot in mine/, so the reference's: m2.2. ")


def test_damaged_notes_are_named(mine: Mine) -> None:
    notes = mine.folder / ".course.json"
    script = "from folovllm.learn.overlay import started_milestone; started_milestone()"
    for text in ("{", "[]"):
        notes.write_text(text)
        status, said = run_pytest(mine, "--mine")
        assert status == 4 and f"{notes} is damaged: delete it" in said and "Traceback" not in said
        said = run(sys.executable, "-c", script, cwd=mine.folder, path=mine.course.root, FOLOVLLM_MINE="mine")[1]
        assert said.splitlines()[-1] == f"ValueError: {notes} is damaged: `python -m milestones` says what to do"


def test_a_module_imported_too_early_is_no_false_green(mine: Mine) -> None:
    early = (
        "import folovllm.pool, os\nos.environ['FOLOVLLM_MINE'] = 'mine'\nimport pytest, sys\nsys.exit(pytest.main())\n"
    )
    status, said = run(sys.executable, "-c", early, cwd=mine.course.root, path=mine.course.root)
    assert status == 1 and "this was not your code" in said and "folovllm.pool came from" in said


def test_spawned_workers(mine: Mine, tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(
        "import multiprocessing\n"
        "def work(_):\n    import folovllm.pool\n    return folovllm.pool.__file__\n"
        "if __name__ == '__main__':\n"
        "    import folovllm\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(*pool.map(work, [0]))\n"
    )
    _, said = run(sys.executable, str(script), cwd=tmp_path, path=mine.course.root, FOLOVLLM_MINE=str(mine.folder))
    assert said.strip() == str(mine.folder / "folovllm/pool.py")


def test_notebooks(mine: Mine) -> None:
    """Jupyter's kernel inherits the switch; a notebook inside mine/ turns it on by itself."""
    import nbformat
    from nbclient import NotebookClient

    cells = [
        "from milestones import notebooks; notebooks.running('m1')",
        "import folovllm.pool; print(folovllm.pool.__file__)",
    ]
    for folder, expected in ((mine.folder, mine.folder), (mine.course.root, mine.course.root)):
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        path = os.pathsep.join([str(mine.course.root), str(ROOT)])
        environment = {k: v for k, v in os.environ.items() if k != "FOLOVLLM_MINE"} | {"PYTHONPATH": path}
        NotebookClient(book, resources={"metadata": {"path": str(folder)}}).execute(env=environment)
        said = [cell.outputs[0].text.strip() for cell in book.cells]
        assert said[0] == ("running: yours (2 of 2)" if folder == mine.folder else "running: the reference")
        assert said[1] == str(expected / "folovllm/pool.py")


@pytest.fixture(params=["ordinary", "editable"])
def installed(request: pytest.FixtureRequest, sample: Course, tmp_path: Path) -> Path:
    """The sample installed, by pip, into a folder that `site` reads: packages and console script."""
    site = tmp_path / "site"
    words = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q"]
    kind = ["--editable"] if request.param == "editable" else []
    command = [sys.executable, "-m", "pip", "install", *words, "--target", str(site), *kind, str(sample.root)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def test_installed(installed: Path, mine: Mine) -> None:
    """From a folder within the checkout, however the package was installed; nothing else of this machine is in reach."""
    script = f"import site, sys; site.addsitedir({str(installed)!r}); sys.argv[1:] = ['--mine']\n"
    script += "from folovllm.__main__ import main; main()"
    _, said = run(sys.executable, "-S", "-c", script, cwd=mine.folder / "folovllm", path=None)
    assert said.strip() == str(mine.folder / "folovllm/pool.py")
    assert (installed / "bin" / "folovllm").is_file()
