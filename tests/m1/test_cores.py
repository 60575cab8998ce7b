"""Cores that a process may use: its affinity, and the quotas of Linux's control groups of both versions."""

import os
from pathlib import Path

import pytest

from folovllm.distributed import cores


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 cores, of which this process may run on all; it has no control groups yet."""
    monkeypatch.setattr(cores, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_no_quota(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores.num_cores() == 64
    write(machine / "own", "0::/\n")
    assert cores.num_cores() == 64, "what is not visible bounds nothing"
    write(machine / "groups/cpu.max", "max 100000\n")
    assert cores.num_cores() == 64
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert cores.num_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.num_cores() == 1, "not every system says how many there are"


@pytest.mark.parametrize(("quota", "expected"), [(400000, 4), (150000, 2), (1000, 1), (9900000, 64)])
def test_version_2(machine: Path, quota: int, expected: int) -> None:
    write(machine / "own", "0::/\n")
    write(machine / "groups/cpu.max", f"{quota} 100000\n")
    assert cores.num_cores() == expected


def test_the_smallest_quota_of_all_groups_around_it(machine: Path) -> None:
    write(machine / "own", "0::/pods/one:two\n")
    write(machine / "groups/cpu.max", "max 100000\n")
    write(machine / "groups/pods/cpu.max", "300000 100000\n")
    write(machine / "groups/pods/one:two/cpu.max", "800000 100000\n")
    assert cores.num_cores() == 3


def test_version_1(machine: Path) -> None:
    """The path of the host's is not visible in a container; its own group is mounted in its place."""
    write(machine / "own", "3:memory:/docker/1\n2:cpuacct,cpu:/docker/1\n1:name=systemd:/\n0::/\n")
    group = machine / "groups/cpu"
    write(group / "cpu.cfs_quota_us", "-1\n")
    write(group / "cpu.cfs_period_us", "100000\n")
    assert cores.num_cores() == 64
    write(group / "cpu.cfs_quota_us", "250000\n")
    assert cores.num_cores() == 3


def test_a_group_outside_of_what_is_visible(machine: Path) -> None:
    """As of a process that another control-group namespace has."""
    write(machine / "own", "0::/../../other\n")
    write(machine / "groups/cpu.max", "200000 100000\n")
    assert cores.num_cores() == 2
