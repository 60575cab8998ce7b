"""Mutants: the engine is made wrong in one way after another, and a test must notice each.

    python -m tools.mutants                                     # all of them: about ten minutes on one core
    python -m tools.mutants --only cache                        # those of one package
    python -m tools.mutants --only admission-takes-the-reserve  # one of them, by its name

A file of tests/mutants/ has the mutants of one package. Each has a name; the *behaviour*, a sentence that says what the engine
does wrong; *where* that is today (module:function), *old*, a text that this function holds once, and *new*, what replaces it;
and the *test* that fails then, within a minute on one core (pytest's node ids).

First the tests run on the engine as it is, and must pass. Then each mutant runs: in a folder that stands for the one module
(`FOLOVLLM_MINE`), so the working tree stays as it is. A mutant is

    killed        a test failed, as it should
    survived      all tests passed: a hole in the tests
    too slow      no test had failed after `--limit` seconds
    not run       pytest did not come to its tests, or there are none of these names
    anchor lost   the function or its old text is gone: find the place where the behaviour is decided now, and write the same
                  mistake there

The exit code is 0 if all are killed, else 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milestones import splice

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "tests/mutants"
LIMIT = 60.0  # seconds
OUTCOMES = {0: "survived", 1: "killed", None: "too slow"}  # by pytest's exit status; all others: not run


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake, where it is made, and the tests that notice it. Texts are as in the module's docstring."""

    package: str
    name: str
    behaviour: str
    where: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> Path:
        """The file of the module, from the root on."""
        return Path(self.where.partition(":")[0].replace(".", "/") + ".py")

    def source(self) -> str:
        """The module with the mistake in it. Raises LookupError where the function, or its old text, is not there once."""
        try:
            text = (ROOT / self.path).read_text("utf-8")
        except FileNotFoundError as error:
            raise LookupError(f"there is no {self.path}") from error
        function, lines = splice.find(text, self.where.partition(":")[2]), text.split("\n")
        body = "\n".join(lines[function.start : function.end])
        if (count := body.count(self.old)) != 1:
            raise LookupError(f"{self.where} holds the old text {count} times")
        return "\n".join([*lines[: function.start], body.replace(self.old, self.new), *lines[function.end :]])


def stored(only: str | None = None) -> list[Mutant]:
    """The stored mutants: all, those of a package, or one by its name. Raises ValueError where there are none."""
    files = {file.stem: tomllib.loads(file.read_text("utf-8"))["mutant"] for file in sorted(STORE.glob("*.toml"))}
    every = [Mutant(package, **fields) for package, mutants in files.items() for fields in mutants]
    if not (found := [mutant for mutant in every if only in (None, mutant.package, mutant.name)]):
        raise ValueError(f"no mutant and no package is named {only!r}")
    return found


def run_tests(mine: Path, tests: Iterable[str], limit: float | None = None) -> tuple[int | None, str]:
    """Run tests while the modules in `mine` stand for the engine's. Returns pytest's status, None after the limit, and its output."""
    env = {**os.environ, "FOLOVLLM_MINE": str(mine), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with suppress(ProcessLookupError):  # also what the tests have started
                os.killpg(process.pid, signal.SIGKILL)


def outcome(mutant: Mutant, limit: float = LIMIT) -> tuple[str, str]:
    """What became of a mutant, and what to say of it if it was not killed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        file = Path(folder, mutant.path)
        file.parent.mkdir(parents=True)
        try:
            file.write_text(mutant.source(), "utf-8")
        except LookupError as error:
            return "anchor lost", str(error)
        status, output = run_tests(Path(folder), mutant.test.split(), limit)
    return OUTCOMES.get(status, "not run"), output[-1000:] if status not in OUTCOMES else mutant.test


def run_clean(mutants: Sequence[Mutant]) -> None:
    """Run all tests on the engine as it is. Raises SystemExit if one fails: it would kill anything."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        Path(folder, "folovllm").mkdir()
        status, output = run_tests(
            Path(folder), dict.fromkeys(test for mutant in mutants for test in mutant.test.split())
        )
    if status:
        raise SystemExit(f"{output}\nthese tests fail without any mutant")


def main() -> None:
    """Run the mutants that are asked for, one at a time, and say what became of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="the mutants of this package, or the one of this name")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for the test of one mutant")
    wanted = parser.parse_args()
    try:
        mutants = stored(wanted.only)
    except ValueError as error:
        parser.error(str(error))
    run_clean(mutants)
    found: Counter[str] = Counter()
    for mutant in mutants:
        start = time.monotonic()
        what, output = outcome(mutant, wanted.limit)
        print(f"{what:<12}{time.monotonic() - start:5.1f} s  {mutant.package:<14}{mutant.name}", flush=True)
        if what != "killed":
            print(f"    {mutant.behaviour}\n    {output}", flush=True)
        found[what] += 1
    print(f"{len(mutants)} mutants: {', '.join(f'{count} {what}' for what, count in found.most_common())}")
    sys.exit(found["killed"] < len(mutants))


if __name__ == "__main__":
    main()
