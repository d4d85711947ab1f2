"""The memory that a program can have: the machine's, or what its container leaves of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distrain.trainer.system import memory
from distrain.trainer.system.memory import free_memory, program_memory

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=memory.CGROUP_FILES)
def cgroup(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The files of a container's limit and use, in a folder of the test's own."""
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    limit, used = (tmp_path / name for name in request.param)
    limit.parent.mkdir(exist_ok=True)
    return limit, used


def test_a_containers_limit_bounds_both(cgroup: tuple[Path, Path]) -> None:
    limit, used = cgroup
    limit.write_text("3000000\n")
    used.write_text("1000000\n")
    assert (program_memory(), free_memory()) == (3_000_000, 2_000_000)
    used.write_text("3500000\n")
    assert free_memory() == 0


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n"])
def test_without_a_limit_it_is_the_machines(cgroup: tuple[Path, Path], text: str) -> None:
    limit, used = cgroup
    limit.write_text(text)
    used.write_text("1000000\n")
    assert program_memory() == MACHINE
    assert 0 < free_memory() <= MACHINE


def test_a_limit_whose_use_is_unknown_bounds_the_whole(cgroup: tuple[Path, Path]) -> None:
    cgroup[0].write_text("3000000\n")
    assert program_memory() == 3_000_000
    assert free_memory() <= 3_000_000
