"""What the fork server does before its first child: it reads what each job reads again."""

import copy
import functools
import tomllib
from types import SimpleNamespace

from milestones import manifest
from tests.course.farm import ROOT

loads = functools.cache(tomllib.loads)
manifest.tomllib = SimpleNamespace(loads=lambda text: copy.deepcopy(loads(text)))  # type: ignore[attr-defined]
_ = manifest.Course(ROOT).milestones
