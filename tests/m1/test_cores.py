"""Cores that a process may use: its affinity, and the quotas of Linux's control groups of both versions."""

import os
from pathlib import Path

import pytest

from folovllm.distributed import cores

ALL, FOUR, THREE, TWO = "max 100000\n", "400000 100000\n", "300000 100000\n", "200000 100000\n"
V1 = "3:memory:/docker/1\n2:cpuacct,cpu:/docker/1\n1:name=systemd:/\n0::/\n"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 cores, of which this process may run on all; it has no control groups yet."""
    monkeypatch.setattr(cores, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("own", "groups", "expected"),
    [
        (None, {}, 64),
        ("0::/\n", {}, 64),  # what is not visible bounds nothing
        ("0::/\n", {"cpu.max": ALL}, 64),
        ("0::/\n", {"cpu.max": FOUR}, 4),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "1000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 64),
        # The smallest quota of all groups around it.
        ("0::/pods/a:b\n", {"cpu.max": ALL, "pods/cpu.max": THREE, "pods/a:b/cpu.max": "800000 100000\n"}, 3),
        # A group outside of what is visible, as of a process that another control-group namespace has.
        ("0::/../../other\n", {"cpu.max": TWO}, 2),
        # Version 1. The path of the host's is not visible in a container; its own group is mounted in its place.
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        (V1, {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_quotas(machine: Path, own: str | None, groups: dict[str, str], expected: int) -> None:
    files = {f"groups/{name}": text for name, text in groups.items()} | ({} if own is None else {"own": own})
    for name, text in files.items():
        (machine / name).parent.mkdir(parents=True, exist_ok=True)
        (machine / name).write_text(text)
    assert cores.num_cores() == expected


def test_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert cores.num_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.num_cores() == 1, "not every system says how many there are"
