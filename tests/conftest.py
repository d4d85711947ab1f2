"""Settings and fixtures of all tests: property tests draw the same examples every time, on however slow a machine."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from distrain.tests.fakes.rank_pool import RankPool

settings.register_profile("steady", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# Test files that wait for deaths, heartbeat timeouts and signals, mount file systems, or look at every process of this machine:
# `bash scripts/test` runs them beside all others.
TIMED = (
    "test_hosts", "test_hosts_training", "test_faults", "test_slurm", "test_secrets", "test_hangs", "test_checkpoint_kills",
    "test_registration", "test_preflight", "test_preflight_hosts", "test_calibrate_hosts", "test_measure_hosts", "test_openmpi",
    "test_machine", "test_startup", "test_spares",
)  # fmt: skip
# Test files that take more than five seconds, the longest first: workers begin with these, and `bash scripts/test --quick` leaves them out.
SLOW = (
    "test_matrix", "test_native", "test_delayed", "test_compression", "test_muon_layouts",
    "test_pipe", "test_fit_resume", "test_moe_training", "test_moe", "test_fit_matrix", "test_fit_data", "test_checkpoint_layouts",
    "test_launch_commands", "test_cp", "test_fit_ends", "test_prove", "test_prove_written", "test_trace", "test_malformed_input",
    "test_streams_and_signals", "test_loss_kernels",
    "test_anomalies", "test_hf_family", "test_hf_offline", "test_huge", "test_export", "test_doors", "test_load", "test_keys",
    "test_html_plan", "test_report", "test_report_timeline", "test_html_report",
    "test_page_widths", "test_fit_changes", "test_estimate", "test_export_tokenizer", "test_fit_refused", "test_begin",
    "test_begin_quantized", "test_rejected_arguments", "test_damaged_runs", "test_verbs", "test_doctor_run", "test_fit_sweep",
    "test_keys_of_other_trainers",
    "test_resume_changes", "test_lora", "test_lm_eval", "test_pairs", "test_placement", "test_controller", "test_quantities",
    "test_doctor", "test_generate", "test_stops", "test_mutations", "test_trace_cuda", "test_acceptance", "test_compile",
    "test_device_checks", "test_fit_saves", "test_sinks", "test_prove_layouts", "test_context", "test_ledger", "test_split_linear",
    "test_layers", "test_modules", "test_formulas", "test_fit_problems", "test_memory_properties", "test_shell_injection", "test_windows",
    "test_outcome", "test_config_keys", "test_rope_scaling", "test_hf_weights", "test_sources", "test_survey_process",
    "test_fit_pairs", "test_controller_output", "test_chat_template", "test_search", "test_search_written", "test_search_bounds",
    "test_error_bars", "test_weight_decay", "test_deferred_products", "test_padded_heads", "test_quantized_weights",
    "test_begin_adapter", "test_evaluate_run", "test_random_layouts",
)  # fmt: skip

PARTS: dict[str, Callable[[str], bool]] = {
    "quick": lambda stem: stem not in TIMED and stem not in SLOW,
    "untimed": lambda stem: stem not in TIMED,
    "timed": lambda stem: stem in TIMED,
}


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests."""
    gc.disable()  # while test files are imported, until the first test: a tenth of a worker's collection
    restore_signals()
    if config.getoption("--part") == "untimed" and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        keep_to_one_core(int(worker.removeprefix("gw")))
        let_threads_finish()


def restore_signals() -> None:
    """Restore the signals that nohup and a shell's & ignore: children of the tests inherit them and must be stoppable."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def keep_to_one_core(worker: int) -> None:
    """Keep a test worker, and the ranks that it will start, to one core.

    Ranks of tiny models mostly wait for each other's messages, and a wake-up on the same core costs less than one across cores, above all
    in virtual machines.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[worker % len(cores)]})


def let_threads_finish() -> None:
    """Schedule a test worker, and the ranks that it will start, as a batch: a woken thread waits until the running one blocks.

    Otherwise the threads of gloo interrupt each other at every message, which takes a sixth of the CPU time of four or eight ranks.
    """
    if hasattr(os, "sched_setscheduler"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let scripts/test run a part of the files, and read no others."""
    parser.addoption("--part", choices=tuple(PARTS), help="run only some test files, which tests/conftest.py lists")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that are not in the part."""
    part = config.getoption("--part")
    return True if part and collection_path.suffix == ".py" and not PARTS[part](collection_path.stem) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slowest files first."""
    first = {stem: place for place, stem in enumerate((*TIMED, *SLOW))}
    items.sort(key=lambda item: first.get(item.path.stem, len(first)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Have torch compute on one thread: small products take longer on two, which wait for each other where cores are busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def rare_garbage_collection() -> None:
    """Leave what was imported and collected out of garbage collection, which takes a third of a composition's time."""
    from distrain.trainer.system.garbage_collection import RARE

    gc.freeze()
    gc.set_threshold(*RARE)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for the tests alone, so that earlier measurements and tokenized data on this machine change nothing.

    Test workers share the measurements of this machine, each of which takes 3 s of CPU time.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        if "PYTEST_XDIST_WORKER" in os.environ:
            measured = tmp_path_factory.getbasetemp().parent / "machines"
            measured.mkdir(exist_ok=True)
            (folder / "distrain").mkdir()
            (folder / "distrain" / "machines").symlink_to(measured)
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Ranks that have already imported torch and DeepSpeed."""
    from distrain.tests.fakes.rank_pool import RankPool

    pool = RankPool(tmp_path_factory.mktemp("ranks") / "server.log")
    with pool.server:
        yield pool


@pytest.fixture(scope="session")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 1 MB, shared by the session's tests."""
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
    """A file system of 1 MB, emptied after the test."""
    yield small_disk
    for path in small_disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def read_only_disk(disk: Path) -> Iterator[Path]:
    """A file system that can only be read."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    yield disk
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
