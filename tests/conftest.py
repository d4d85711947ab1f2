"""How property tests run: the same examples every time, however slow the machine. And the pool that multi-rank tests run on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")

DEADLINE = 120.0  # seconds that a job may take

# Files of tests that wait for deaths, silences and signals, mount and unmount, or look at every process of this machine:
# `bash scripts/test` runs them after all others, with nothing beside them.
ALONE = (
    "test_checkpoint_kills", "test_faults", "test_hangs", "test_hosts", "test_machine", "test_openmpi", "test_preflight",
    "test_rendezvous", "test_secrets", "test_slurm", "test_startup",
)  # fmt: skip


def pytest_configure() -> None:
    """Undo what nohup and a shell's & do: children of the tests, which inherit ignored signals, are to be stopped by them."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that run alone."""
    for item in items:
        if item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on the pool's ranks, ended: each rank's exit status, what rank 0 said, what went wrong in a rank's own words."""

    folder: Path
    codes: tuple[int, ...]
    said: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl: every start of the folder's run."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def figures(self, key: str) -> list[float]:
        """One figure of every logged step; where a step was run twice, of its last time."""
        return list({row["step"]: row[key] for row in self.rows if key in row}.values())


class Ranks:
    """The fork server of `distrain prove`; jobs run one after another."""

    def __init__(self, log: Path, **more: Any) -> None:
        from distrain.trainer.prove.fork_client import Server

        self.server = Server(log, environment={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, **more)

    def fit(self, folder: Path, *words: str, signals: Sequence[tuple[int, int, int]] = ()) -> Job:
        """Train conf=`words[0]` with the other words as `distrain fit` would, RUN_DIR being `folder`.

        `signals` are (step, rank, signal): sent to the rank when it is at the step. Fails where the job passes its deadline.
        """
        from msgspec import json as encoder

        from distrain.cli.config.load import load
        from distrain.cli.verbs.fit import refused
        from distrain.trainer.plan.plan import make_plan

        run = load(words[0], [*words[1:], f"log.dir={folder.parent}", f"name={folder.name}"])
        plan = make_plan(run)
        assert not refused(run, plan)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_bytes(encoder.encode(run))
        crew = self.server.trained(folder / "run.json", plan.world, seconds=DEADLINE, signals=signals)
        if crew.late:
            pytest.fail(f"{' '.join(words)} passed its {DEADLINE:.0f} s:\n{tails(folder)}")
        return Job(folder=folder, codes=crew.codes, said=crew.said, problems=crew.problems)

    def trained(self, folder: Path, *words: str) -> Job:
        """A job whose ranks all end well."""
        job = self.fit(folder, *words)
        if set(job.codes) != {0}:
            pytest.fail(f"{' '.join(words)} ended with {job.codes}: {job.problems}\n{tails(folder)}")
        return job


def tails(folder: Path) -> str:
    """The last lines of each rank's log."""
    logs = sorted((folder / "ranks").glob("*.log"))
    return "\n".join(f"-- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]) for log in logs)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the tests' own: what was measured on this machine, or tokenized here, decides nothing."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks that have imported torch and DeepSpeed already."""
    pool = Ranks(tmp_path_factory.mktemp("ranks") / "server.log")
    with pool.server:
        yield pool


@pytest.fixture(scope="session")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of 1 MB."""
    folder = tmp_path_factory.mktemp("disk")
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root can mount a small disk")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def disk(small_disk: Path) -> Iterator[Path]:
    yield small_disk
    for path in small_disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
