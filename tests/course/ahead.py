"""What the fork server does before its first child: it reads what each job reads again, and cuts out what most jobs cut out."""

import copy
import functools
import tomllib
from collections.abc import Mapping
from types import SimpleNamespace

from milestones import manifest, mine, splice
from tests.course.farm import ROOT

loads = functools.cache(tomllib.loads)
manifest.tomllib = SimpleNamespace(loads=lambda text: copy.deepcopy(loads(text)))  # type: ignore[attr-defined]

blank = splice.blank


@functools.cache
def blanked(source: str, stubs: tuple[tuple[str, str], ...]) -> str:
    return blank(source, dict(stubs))


def blank_once(source: str, stubs: Mapping[str, str]) -> str:
    """As `splice.blank`."""
    return blanked(source, tuple(stubs.items()))


splice.blank = blank_once
course = manifest.Course(ROOT)
for milestone in course.milestones:
    later = course.onwards(milestone.id)
    for path, exercises in mine.by_file(later).items():
        blank_once(course.source(path), mine.names(exercises, path))
