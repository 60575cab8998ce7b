"""Builders: what each consists of, and that its tests reject wrong components and the empty file."""

from __future__ import annotations

from pathlib import Path

import pytest

from milestones.builders import template
from milestones.manifest import Course
from milestones.tasks import Builder
from tests.course.farm import Farm, Job, builder_jobs, complaint, later_jobs

COURSE = Course(Path(__file__).resolve().parents[2])
each_builder = pytest.mark.parametrize("builder", COURSE.builders, ids=lambda b: b.id)


@pytest.mark.timeout(1200)  # the farm has its own limits, and a job may wait its turn
@pytest.mark.parametrize("job", builder_jobs(COURSE), ids=str)
def test_it_is_rejected(job: Job, farm: Farm) -> None:
    result = farm.result(job)
    failed = [test for test, outcome, _ in result.outcomes if outcome == "failed"]
    assert result.status == 1 and failed, f"{', '.join(job.tests)} do not notice {job.name}:\n{result.output[-2000:]}"
    broken = [error for error in ("ImportError", "NameError", "SyntaxError") if error in result.output]
    assert not broken, f"{job.name} is not wrong, it does not run: {broken}\n{result.output[-2000:]}"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("job", later_jobs(COURSE), ids=str)
def test_it_needs_no_later_exercise(job: Job, farm: Farm) -> None:
    """A learner's files have stubs of what comes after the milestone, too."""
    if said := complaint(job, farm.result(job)):
        pytest.fail(said, pytrace=False)


@each_builder
def test_each_has_its_parts(builder: Builder) -> None:
    assert len(builder.wrong) >= 2 and all(file.read_text("utf-8").startswith('"""') for file in builder.wrong)
    assert all((COURSE.root / test).is_file() for test in builder.tests)
    for part in ("## Given", "## The tests", "## The score"):
        assert part in builder.statement, f"the task of {builder.id} has no section {part}"
    hints = COURSE.hints(builder)
    assert len(hints) == 3 and len({text for _, text in hints}) == 3
    assert builder.reference.is_file() and builder.minutes > 0


@each_builder
def test_what_a_learner_begins_with_is_python(builder: Builder) -> None:
    compile(template(builder, COURSE), f"{builder.name}.py", "exec")
