"""How many cores this process may use: a container on a large machine may have a few of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # Linux's control groups, and which of them are ours


def num_cores() -> int:
    """Return how many cores this process may use: those it may run on, at most a control group's quota, rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in groups() if (quota := quota_of(folder)) is not None]
    return min(allowed, *(max(1, math.ceil(quota)) for quota in quotas)) if quotas else allowed


def groups() -> Iterator[Path]:
    """The folders of our control groups that may divide cores, from the innermost out. Not all need be visible here."""
    for line in OWN.read_text().splitlines() if OWN.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        top = GROUPS if number == "0" else GROUPS / "cpu"  # version 2 and 1
        folder = top / path.lstrip("/")
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def quota_of(folder: Path) -> float | None:
    """The cores that a control group may keep busy; None if it has no bound, or is not visible here."""
    if (folder / "cpu.max").is_file():
        quota, period = (folder / "cpu.max").read_text().split()
    elif (folder / "cpu.cfs_quota_us").is_file():
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    else:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
