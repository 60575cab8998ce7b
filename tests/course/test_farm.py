"""The judge judged: it is content with the sample course, and complains of each flaw that is put into it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from milestones.manifest import Course
from tests.course.farm import Farm, Job, complaint, jobs


def find(course: Course, name: str) -> Job:
    return next(job for job in jobs(course) if str(job) == name)


def test_a_sound_course(sample: Course, farm: Farm) -> None:
    found = jobs(sample)
    assert len(found) == 4 * (1 + 2 + 1) + 1
    farm.submit(found)
    assert {str(job): said for job in found if (said := complaint(job, farm.result(job)))} == {}


def change(path: str, old: str, new: str) -> Callable[[Path], None]:
    return lambda root: (root / path).write_text((root / path).read_text().replace(old, new)) and None


TEST = "tests/m1/test_pool.py"
WRONG = "milestones/m1_pool/wrong/m1.1_none.py"
STALE = '{"m1.1": {"m1.1_none": 7}}'
RIGHT = (
    '"""Right."""\n\n\nclass Pool:\n    def take(self):\n        return self.free.popleft() if self.free else 1 / 0\n'
)


@pytest.mark.parametrize(
    ("flaw", "job", "said"),
    [
        (change("tests/m2/test_kernel.py", "doubled(torch", "(lambda x: 2 * x)(torch"), "m2.2-blank", "do not notice"),
        (change(TEST, "    pool = Pool(2)\n    assert", "    assert 0\n    assert"), "m1.1-blank", "not with m1.1"),
        (change(TEST, "pytest.raises(Empty)", "pytest.raises(BaseException) if 0 else __import__('contextlib').suppress(Empty)"), "m1.1_none-wrong", "do not notice"),
        (change("milestones/m1_pool/milestone.toml", 'needs = ["m1.1"]', "needs = []"), "m1.2-alone", "'m1.1')] while m1.1, m2.1, m2.2 are"),
        (change(TEST, "    pool.give", "    pool.share(1)\n    pool.give"), "m1-later", "'m2.1')] while m2.1, m2.2 are"),
        (change(WRONG, "return", "import os; os._exit(7)\n        return"), "m1.1_none-wrong", "the process died, status 7"),
        (change(TEST, "import pytest", "import nothing"), "m1.1_none-wrong", "did not run to an end: 4"),
        (change(TEST, "def test_take", "@pytest.mark.skip\ndef test_take"), "m1.1-alone", "all skipped"),
        (lambda root: (root / WRONG).with_name("m1.1.json").write_text(STALE) and None, "m1.1_none-wrong", "it gives {} in the worked"),
        (change(TEST, "test_take():", "test_take():\n    raise ValueError('m1.1: take')"), "m1.1_none-wrong", "said to be unwritten"),
    ],
    ids=["bypassed", "other-failure", "hole", "undeclared-need", "no-growth", "crash", "no-import", "skipped", "stale", "unwritten"],
)  # fmt: skip
def test_a_flaw_is_complained_of(sample: Course, farm: Farm, flaw: Callable[[Path], None], job: str, said: str) -> None:
    flaw(sample.root)
    found = find(Course(sample.root), job)
    assert said in complaint(found, farm.result(found))
