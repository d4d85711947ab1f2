"""The acceptance of a GPU, rehearsed on a CPU; and reports of GPUs, kept in this folder, to which today's plan is held."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from distrain.cli.config.load import load_recipe
from distrain.scripts.gpu import (
    calibration,
    check_context,
    fit_runs,
    further_curves,
    kernel_rates,
    loss_checks,
    options,
    planned_runs,
    proved_layouts,
    quantized_folder,
    several_gpus,
)
from distrain.scripts.gpu.__main__ import closing_lines, row_lines
from distrain.scripts.gpu.acceptance import Report, carry_out, read_report
from distrain.scripts.gpu.check_context import CheckContext
from distrain.scripts.gpu.checks import CHECKS, GpuCheck, chosen_checks
from distrain.scripts.gpu.finding import CheckBroken, CheckSkipped, Finding
from distrain.scripts.gpu.fit_runs import FinishedFit, FitRun, fit_each, fit_overrides, fit_together
from distrain.scripts.gpu.planned_runs import PLANNED, plan_departures
from distrain.scripts.gpu.profiled_steps import wait_departures
from distrain.scripts.gpu.replan import replan_departures
from distrain.scripts.gpu.running_check import Row, RunningCheck
from distrain.tests.fakes.deadline import DEADLINE
from distrain.trainer.launch import admission
from distrain.trainer.machine import measure_machine
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.timeline.timed_spans import TimedSpan, TimedStep
from distrain.trainer.prove.trials.layouts import run_in_layout
from distrain.trainer.prove.trials.plan_proof import Proof
from distrain.trainer.rundir.metric_rows import AVERAGED_KEY, VALIDATION_KEY
from distrain.trainer.rundir.timeline_files import RankTimeline, write_rank_timeline

FAKE = "distrain.tests.gpu.fake_check:act"
REPORTS = sorted(Path(__file__).parent.glob("*.json"))
# On a GPU, as `compare_with_plan` keeps it.
MEASURED: dict[str, Any] = {
    "recipe": "gpt2_124m_1gpu",
    "words": ["cluster.nodes=1", "cluster.gpus=1", "device=h200", "parallel.dp=1", *PLANNED["gpt2_124m"].words],
    "memory": {"weights": 1.0},
    "planned_memory": {"weights": 1.0},
    "memory_peak": 102,
    "planned_memory_peak": 100,
    "step_seconds": 0.9,
    "planned_step_seconds": 1.0,
}


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_today_s_plan_is_no_further_from_what_a_gpu_measured(path: Path) -> None:
    report = read_report(path, rehearsal=False)
    assert report is not None
    assert list(replan_departures(report)) == []


REHEARSED = (
    "machine",
    "two ranks",
    "several GPUs",
    "quantized folder",
    "calibrate",
    "plan gpt2_1_5b recomputed",
    "baseline fully_shard llama 16 layers",
)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    path = tmp_path_factory.mktemp("gpu") / "report.json"
    only = ",".join(REHEARSED)
    words = ("--cpu", "--json", str(path), "--only", only, "--folder", str(path.parent / "runs"))
    return subprocess.run([sys.executable, "-m", "distrain.scripts.gpu", *words], capture_output=True, text=True, check=False), path


def test_checks_pass_on_a_cpu(rehearsal: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """Two ranks of each layout, of both engines, send every message through the host's copies, as on one GPU."""
    ended, path = rehearsal
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    report = read_report(path, rehearsal=True)
    assert report is not None
    assert {row.name: row.status for row in report.rows} == dict.fromkeys(REHEARSED, "passed")
    lines = ended.stdout.splitlines()
    assert {line.split("  ")[0] for line in lines[: len(REHEARSED)]} == set(REHEARSED)
    assert lines[-2].startswith(f"{len(REHEARSED)} passed; ")
    (two_ranks,) = (row.figures for row in report.rows if row.name == "two ranks")
    assert {each["verdict"] for each in two_ranks["layouts"].values()} == {"same"}


def test_a_planned_run_is_planned_again(rehearsal: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """Its bytes by kind are held to what was measured; a measured figure that the plan does not reach is named."""
    report = read_report(rehearsal[1], rehearsal=True)
    assert report is not None
    assert list(replan_departures(report)) == []
    rows = [
        replace(row, figures={**row.figures, "memory": {**row.figures["memory"], "optimizer": 1.04 * row.figures["memory"]["optimizer"]}})
        for row in report.rows
        if row.name == "plan gpt2_1_5b recomputed"
    ]
    assert list(replan_departures(replace(report, rows=rows))) == []  # as far then as today
    rows = [replace(row, figures={**row.figures, "planned_memory": row.figures["memory"]}) for row in rows]
    (found,) = replan_departures(replace(report, rows=rows))
    assert found == "plan gpt2_1_5b recomputed: memory of optimizer was measured +4.0 % of today's plan, +0.0 % then"


def test_a_time_on_a_gpu_is_planned_again() -> None:
    report = Report(schema=1, rehearsal=False, seconds=1.0, rows=[Row(name="plan gpt2_124m", status="passed", figures=MEASURED)])
    found = list(replan_departures(report))
    assert [each.partition(" was ")[0] for each in found] == [
        f"plan gpt2_124m: {what}" for what in ("memory of weights", "peak memory", "step time")
    ]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"has_rates": False, "planned_step_seconds": None}, []),
        ({"memory_peak": 104}, ["peak memory is +4.0 % of the plan's"]),
        ({"memory_peak": 96}, ["peak memory is -4.0 % of the plan's"]),
        ({"step_seconds": 1.2}, ["step time is +20.0 % of the plan's"]),
        ({"memory": {"weights": None}}, ["memory of weights: not known"]),
        ({"planned_step_seconds": None}, ["step time: not known"]),
    ],
)
def test_goals_are_3_and_10_percent(change: dict[str, Any], found: list[str]) -> None:
    assert plan_departures({**MEASURED, **change}) == found


# What a check does, its seconds, those that are left; how its row reads.
OUTCOMES: tuple[tuple[str, float, float, str, list[str]], ...] = (
    ("passes", 60, 99, "passed", []),
    ("departs", 60, 99, "failed", ["a is not 2"]),
    ("is broken", 60, 99, "broken", ["for a reason"]),
    ("needs another machine", 60, 99, "skipped", ["it needs two"]),
    ("crashes", 60, 99, "broken", ["KeyError: 'x'"]),
    ("sleeps", 4, 99, "broken", ["killed after 4 s"]),
    ("sleeps", 60, 4, "not run", ["cut after 4 s: the program's time was over"]),
)


@pytest.mark.parametrize(("what", "seconds", "left", "status", "says"), OUTCOMES)
def test_a_check_ends_within_its_time(what: str, seconds: float, left: float, status: str, says: list[str], tmp_path: Path) -> None:
    check = GpuCheck(name="fake", seconds=seconds, function=FAKE, arguments={"what": what})
    with RunningCheck(check, CheckContext(folder=tmp_path, on_gpu=False), left) as running:
        row = running.wait()
    assert (row.status, list(row.says)) == (status, says)
    assert row.seconds < 60  # it would sleep for 600
    assert list(row_lines(row))[1:] == [f"    {each}" for each in says]


def test_a_rehearsal_has_five_times_the_time() -> None:
    """A CPU that runs other tests too takes longer than a GPU."""
    (_, on_gpu), (machine, rehearsed) = (chosen_checks(["kernels"], rehearsal=each) for each in (False, True))
    assert (machine.name, rehearsed.name) == ("machine", "kernels")
    assert rehearsed.seconds == 5 * on_gpu.seconds


def test_checks_run_in_the_order_in_which_they_are_named() -> None:
    """Behind that of the machine, which all need."""
    names = ["plan gpt2_124m compiled", "two ranks", "kernels", "two ranks", "machine"]
    assert [each.name for each in chosen_checks(names, rehearsal=False)] == ["machine", "plan gpt2_124m compiled", "two ranks", "kernels"]


def test_the_page_s_order_of_calls_names_checks() -> None:
    """Each check is in one of the calls, or left to the last one; what can be spent in all is less than is rented."""
    page = (Path(__file__).parents[2] / "docs" / "gpu_acceptance.md").read_text()
    calls = re.findall(r"`\$P --seconds (\d+)(?: --only \"([^\"]+)\")?`", page)
    named = [name for _, names in calls for name in names.split(",") if name]
    assert len(calls) > 2
    assert [names for _, names in calls[:-1] if not names] == []
    assert calls[-1][1] == ""
    assert len(set(named)) == len(named)
    assert set(named) < {check.name for check in CHECKS}
    assert sum(int(seconds) for seconds, _ in calls) <= 780


def test_the_page_says_what_each_check_finds() -> None:
    """Those of one kind have one row with their number."""
    page = (Path(__file__).parents[2] / "docs" / "gpu_acceptance.md").read_text()
    table = page.partition("| check | what must be true |")[2].partition("\n\n")[0]
    rows = [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()[2:]]
    kinds = {kind: sum(check.name.startswith(f"{kind} ") for check in CHECKS) for kind in ("plan", "baseline")}
    others = {check.name for check in CHECKS if check.name.split()[0] not in kinds}
    assert set(rows) == others | {f"{kind} NAME ({count})" for kind, count in kinds.items()}


@pytest.mark.parametrize(
    ("waits", "found"),
    [(4, []), (3, []), (5, ["1.3 waits for the device a step"]), (10, ["3.0 waits for the device a step"])],
)
def test_the_profiler_s_end_is_no_wait_of_a_step(waits: int, found: list[str]) -> None:
    """An H200 counted one wait a step in three steps, and one where the profiler stopped."""
    assert wait_departures(waits, 3) == found


def test_two_ranks_train_in_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These checks run side by side where there are cores for it, and each begins with an empty folder."""
    proofs = list[Proof]()

    def keep(proof: Proof, *_: Any) -> None:
        proofs.append(proof)
        raise InterruptedError

    monkeypatch.setattr(proved_layouts, "run_proof", keep)
    checks = [check for check in CHECKS if check.name.startswith("two ranks")]
    for check in checks:
        with pytest.raises(InterruptedError):
            check.carry_out(CheckContext(folder=tmp_path, on_gpu=True, gpu="NVIDIA H200"))
    assert len(checks) == len({each.folder for each in proofs}) == 4
    runs = [(each.recipe.train.precision, each.recipe.train.compile, each.recipe.model.window) for each in proofs]
    assert runs == [("fp32", False, None), ("bf16", False, None), ("bf16", True, None), ("bf16", False, 16)]
    assert all(trial.plan.problems == () and trial.layout.ranks == 2 for each in proofs for trial in each.trials)
    assert {each.layout.name for each in proofs[-1].trials} >= {"cp2.native", "dp2.zero3.offload_optimizer.native", "dp2.zero2.native"}


def test_a_report_is_resumed(tmp_path: Path) -> None:
    """Checks that passed or failed are not carried out again; broken ones are, and so are those that were not run."""
    path, begun = tmp_path / "report.json", list[str]()
    named = [GpuCheck(name=what, seconds=DEADLINE, function=FAKE, arguments={"what": what}) for what in ("passes", "departs", "is broken")]

    def carry(checks: list[GpuCheck], earlier: Report | None, seconds: float) -> Report:
        return carry_out(
            checks, CheckContext(folder=tmp_path, on_gpu=False), seconds=seconds, path=path, earlier=earlier,
            on_begin=lambda check: begun.append(check.name), on_row=lambda row: None,
        )  # fmt: skip

    first = carry(named, None, DEADLINE)
    assert read_report(path, rehearsal=True) == first
    assert [row.status for row in first.rows] == ["passed", "failed", "broken"]
    later = GpuCheck(name="later", seconds=DEADLINE, function=FAKE, arguments={"what": "passes"})
    second = carry([*named, later], read_report(path, rehearsal=True), DEADLINE)
    assert begun == ["passes", "departs", "is broken", "is broken", "later"]
    assert second.rows[-1].figures == {"earlier": ["departs", "passes"]}
    assert carry([replace(later, name="too late")], second, 0).rows[0].status == "not run"
    with pytest.raises(ValueError, match="of a rehearsal"):
        read_report(path, rehearsal=False)


def test_a_check_that_needs_another_machine_is_counted_apart(tmp_path: Path) -> None:
    """It fails nothing, and is tried again: another machine may carry it out."""
    rows = [Row(name="a", status="passed"), Row(name="b", status="skipped", says=["it needs two"])]
    assert [each.is_done for each in rows] == [True, False]
    report = Report(schema=1, rehearsal=False, seconds=1.0, rows=rows)
    assert closing_lines(report, tmp_path / "gpu.json")[0] == f"1 passed, 1 skipped; 1 s in all; {tmp_path}/gpu.json"


def test_what_is_not_timed_runs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with cores for two; a stop ends those that run, and one that is timed runs alone."""
    monkeypatch.setattr(check_context, "cpu_count", lambda: 2 * check_context.CHECK_CORES)

    def check(what: str, *, alone: bool = False) -> GpuCheck:
        return GpuCheck(name=what, seconds=DEADLINE, function=FAKE, arguments={"what": what}, alone=alone)

    def carry(*checks: GpuCheck, path: Path, on_row: Callable[[Row], None]) -> Report:
        context = CheckContext(folder=path.parent, on_gpu=False)
        return carry_out(checks, context, seconds=DEADLINE, path=path, earlier=None, on_begin=lambda each: None, on_row=on_row)

    def stop(row: Row) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry(check("sleeps"), check("waits for one that sleeps"), path=tmp_path / "first.json", on_row=stop)
    sleeper = int((tmp_path / "asleep").read_text())
    assert not Path(f"/proc/{sleeper}").exists()
    report = read_report(tmp_path / "first.json", rehearsal=True)
    assert report is not None
    assert [row.status for row in report.rows] == ["not run", "passed"]

    (tmp_path / "asleep").unlink()
    sleeps, looks = check("sleeps", alone=True), check("looks for one that sleeps", alone=True)
    for seconds in (5, 20, 80):  # a busy machine may take longer to begin a check than this one has
        report = carry(replace(sleeps, seconds=seconds), looks, path=tmp_path / f"{seconds}.json", on_row=lambda row: None)
        if (tmp_path / "asleep").exists():
            break
    assert [row.status for row in report.rows] == ["broken", "passed"]
    assert report.rows[1].figures == {"alive": False}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--only", "nothing"), "no check 'nothing': --list names them"),
        (("--json", "/no/folder/report.json"), "/no/folder is no folder"),
        (("--json", __file__), "exists: --resume goes on with it, --json names another file"),
        (("--resume", "--json", __file__), "is no report of these checks"),
    ],
)
def test_wrong_arguments_are_one_line(words: tuple[str, ...], says: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "distrain.scripts.gpu", *words], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    path = tmp_path / "report.json"
    ended = subprocess.run([sys.executable, "-m", "distrain.scripts.gpu", "--json", str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "torch finds no GPU: --cpu rehearses the checks on this machine's CPU" in ended.stdout
    assert {row["status"] for row in json.loads(path.read_text())["rows"]} == {"broken", "not run"}


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_run_fits_and_is_planned_whole(name: str, tmp_path: Path) -> None:
    """On one H200: memory and time, so that both can be compared."""
    context, run = CheckContext(folder=tmp_path, on_gpu=True, gpu="NVIDIA H200"), PLANNED[name]
    plan = make_plan(load_recipe(run.recipe, fit_overrides(FitRun(name="a", recipe=run.recipe, words=run.overrides(context)), context)))
    assert plan.problems == ()
    assert plan.memory is not None
    assert plan.memory.peak < 0.7 * 150.1e9
    assert plan.time is not None
    assert 0.1 < plan.time.step < 2


@pytest.mark.parametrize(
    ("gpu", "skipped"),
    [
        ("NVIDIA H200", set()),
        ("NVIDIA A100-SXM4-80GB", set()),
        ("NVIDIA H100 80GB HBM3", set()),
        ("NVIDIA A100-SXM4-40GB", {"llama 16 layers", "llama 16 layers compiled", "gpt2_1_5b compiled", "mixtral 2 layers"}),
        ("NVIDIA GeForce RTX 4090", set(PLANNED) - {"gpt2_124m", "gpt2_124m compiled"}),
    ],
)
def test_what_a_smaller_gpu_can_not_hold_is_skipped(gpu: str, skipped: set[str], tmp_path: Path) -> None:
    context, found = CheckContext(folder=tmp_path, on_gpu=True, gpu=gpu), dict[str, str]()
    for name, run in PLANNED.items():
        try:
            planned_runs.skip_too_large(FitRun(name="a", recipe=run.recipe, words=run.overrides(context)), context)
        except CheckSkipped as error:
            found[name] = str(error)
    assert set(found) == skipped
    if gpu.endswith("4090"):
        assert found["gpt2_1_5b recomputed"] == "it takes 28.7 GiB, and RTX-4090 has 23.6"


COMPARED: tuple[tuple[Any, Callable[[CheckContext], Finding]], ...] = (
    (loss_checks, loss_checks.train_families),
    (loss_checks, loss_checks.compare_precisions),
    (loss_checks, loss_checks.train_zero_stages),
    (options, options.compare_same_curves),
    (options, options.compare_other_curves),
    (further_curves, further_curves.compare_further_ways),
)


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA A100-SXM4-40GB"])
@pytest.mark.parametrize(("module", "check"), COMPARED, ids=[check.__name__ for _, check in COMPARED])
def test_no_plan_refuses_what_is_compared_on_a_gpu(
    module: Any, check: Callable[[CheckContext], Finding], gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An A100 has no products in fp8, and is given none."""
    begun = list[FitRun]()

    def keep(runs: Sequence[FitRun], context: CheckContext) -> Any:
        begun.extend(runs)
        raise InterruptedError

    for name in ("fit_each", "fit_together"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, keep)
    context = CheckContext(folder=tmp_path, on_gpu=True, gpu=gpu)
    with pytest.raises(InterruptedError):
        check(context)
    loaded = {run.name: load_recipe(run.recipe, fit_overrides(run, context)) for run in begun}
    assert len(loaded) == len(begun) > 2
    assert {name: problems for name, run in loaded.items() if (problems := make_plan(run).problems)} == {}
    assert not ("A100" in gpu and any(run.train.precision == "fp8" for run in loaded.values()))


def test_a_gpu_of_which_no_rates_are_known_is_measured_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "NVIDIA A100 80GB PCIe", "memory": 84.9e9, "units": 108, "bf16": True}
    monkeypatch.setattr(measure_machine, "cached_facts", lambda: {"cuda": [gpu], "cpu": None})
    context = CheckContext(folder=tmp_path, on_gpu=True, gpu="NVIDIA A100 80GB PCIe")
    assert not context.has_rates
    assert replace(context, gpu="NVIDIA H200").has_rates
    with pytest.raises(CheckSkipped, match="conf/device has no option of it"):
        kernel_rates.planned_rates(context)


@pytest.mark.parametrize(
    ("cores", "memory", "checks", "trainings"),
    [(2, None, 1, 1), (16, 150e9, 4, 8), (208, 85e9, 4, 8), (16, 42e9, 4, 5), (16, 25.4e9, 4, 3), (8, 25.4e9, 2, 4), (64, 6e9, 4, 1)],
)
def test_no_more_runs_side_by_side_than_the_gpu_holds(
    cores: int, memory: float | None, checks: int, trainings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All share one GPU, however many cores there are."""
    monkeypatch.setattr(check_context, "cpu_count", lambda: cores)
    context = CheckContext(folder=tmp_path, on_gpu=memory is not None, memory=memory)
    assert (context.checks_at_once, context.trainings_at_once) == (checks, trainings)


@pytest.mark.parametrize(("capability", "found"), [([8, 0], False), ([8, 9], True), ([9, 0], True), ([10, 0], True), (None, True)])
def test_products_in_fp8_are_those_of_the_gpu(capability: list[int] | None, found: bool, tmp_path: Path) -> None:
    """By what torch says of it; else by its data sheet, here that of an H100."""
    machine = {"machine": {"compute capability": capability}} if capability else {}
    context = CheckContext(folder=tmp_path, on_gpu=True, gpu="NVIDIA H100 80GB HBM3", earlier=machine)
    assert loss_checks.computes_in_fp8(context) is found
    assert not loss_checks.computes_in_fp8(replace(context, gpu="NVIDIA A100-SXM4-80GB", earlier={}))


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 4), (6, 4), (8, 8), (16, 8)])
def test_several_gpus_train_as_a_power_of_two(gpus: int, ranks: int) -> None:
    assert several_gpus.most_ranks(gpus) == ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layouts_of_several_gpus_can_be_trained(ranks: int, tmp_path: Path) -> None:
    """Each on all of them; the axes are all there."""
    context = CheckContext(folder=tmp_path, on_gpu=True, gpu="NVIDIA H100 80GB HBM3")
    layouts, of_experts = several_gpus.layouts_of(ranks), several_gpus.expert_layouts_of(ranks)
    assert {each.ranks for each in (*layouts, *of_experts)} == {ranks}
    assert len(set(layouts)) == len(layouts)
    assert all(any(getattr(each, axis) > 1 for each in (*layouts, *of_experts)) for axis in ("dp", "tp", "pp", "cp", "ep"))
    for recipe, some in ((several_gpus.WORDS, layouts), (several_gpus.EXPERTS, of_experts)):
        for layout in some:
            plan = make_plan(run_in_layout(load_recipe(fit_runs.RECIPE, (*context.words(ranks), *recipe)), layout))
            assert (layout.name, plan.problems, plan.runnable) == (layout.name, (), True)
    words = several_gpus.fit_words(ranks, context)
    plan = make_plan(load_recipe(fit_runs.RECIPE, fit_overrides(FitRun(name="a", recipe=fit_runs.RECIPE, words=words), context)))
    assert (plan.problems, plan.world) == ((), ranks)


def test_one_gpu_skips_what_needs_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CheckSkipped, match="it needs two GPUs, and this machine has one"):
        several_gpus.train_on_several(CheckContext(folder=tmp_path, on_gpu=True))


def test_fit_on_several_gpus_that_trains_another_curve_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(several_gpus, "prove_layouts", lambda _, name, *__: Finding(figures={}, departures=(f"{name}: failed",)))
    curves = {"on.1": LOSSES, "on.2": [5.5, 5.4, 5.3003]}

    def fit(run: FitRun, *_: Any) -> FinishedFit:
        return FinishedFit(folder=tmp_path, rows=tuple({"loss": each} for each in curves[run.name]), plan={})

    monkeypatch.setattr(several_gpus, "fit", fit)
    context = CheckContext(folder=tmp_path, on_gpu=True)
    layouts = ("several_gpus: failed", "several_gpus.experts: failed")
    assert several_gpus.train_on_several(context).departures == (*layouts, "fit on 2 GPUs is 3.0e-04 nats from one")
    curves["on.2"] = LOSSES
    assert several_gpus.train_on_several(context).departures == layouts


LOSSES = [5.5, 5.4, 5.3]


@pytest.mark.parametrize(
    ("check", "changed", "found"),
    [
        (loss_checks.compare_precisions, {}, []),
        (loss_checks.compare_precisions, {"precision.cpu": [5.5, 5.4, 5.3003]}, ["float32 is 3.0e-04 nats from the CPU's"]),
        (loss_checks.compare_precisions, {"precision.bf16": [5.5, 5.6, 5.3]}, ["bf16 is 3.7 % from float32"]),
        (loss_checks.compare_precisions, {"precision.bf16": [nan, 5.4, 5.3]}, ["bf16 is nan % from float32"]),
        (loss_checks.train_zero_stages, {}, []),
        (loss_checks.train_zero_stages, {"fp32.zero3": [5.5, 5.4, 5.31]}, ["fp32 zero3 is 1.0e-02 nats from fp32 zero0"]),
        (loss_checks.train_zero_stages, {"fp16.zero1": [5.5, 5.4, 5.5]}, ["fp16 zero1 is 2.0e-01 nats from bf16 zero1"]),
        (
            loss_checks.train_zero_stages,
            {"bf16.native.offload": [5.5, 5.4, 5.5]},
            ["bf16 native offload is 2.0e-01 nats from bf16 zero1"],
        ),
        (loss_checks.train_families, {}, []),
        (loss_checks.train_families, {"family.moe": [5.3, 5.4, 5.3]}, ["moe: losses 5.3000 5.4000 5.3000"]),
        (loss_checks.train_families, {"family.hf": [5.3, inf, 5.2]}, ["hf: losses 5.3000 inf 5.2000"]),
        (
            loss_checks.train_families,
            {"family.moe": "family.moe: no", "family.hf": [5.3, inf, 5.2]},
            ["family.moe: no", "hf: losses 5.3000 inf 5.2000"],
        ),
        (loss_checks.train_zero_stages, {"fp16.zero1": "fp16.zero1: no"}, ["fp16.zero1: no"]),
    ],
)
def test_losses_that_differ_are_named(
    check: Callable[[CheckContext], Finding],
    changed: dict[str, Any],
    found: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_by(changed, loss_checks, tmp_path, monkeypatch)
    assert list(check(CheckContext(folder=tmp_path, on_gpu=True)).departures) == found


def train_by(changed: Mapping[str, list[float] | str], module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the runs of a module's checks LOSSES, or what `changed` has for them: other losses, or why they did not train."""

    def fits(runs: Sequence[FitRun], context: CheckContext) -> tuple[dict[str, FinishedFit], dict[str, str]]:
        ended = {run.name: changed.get(run.name, LOSSES) for run in runs}
        failed = {name: each for name, each in ended.items() if isinstance(each, str)}
        rows = {name: tuple({"loss": loss} for loss in each) for name, each in ended.items() if not isinstance(each, str)}
        return {name: FinishedFit(folder=folder, rows=each, plan={}) for name, each in rows.items()}, failed

    for name in ("fit_each", "fit_together"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, fits if name == "fit_each" else lambda *given: fits(*given)[0])


SPANS = (("F", 0, 0, 0.1, 0.2), ("B", 0, 0, 0.2, 0.4), ("F", 1, 0, 0.4, 0.5), ("B", 1, 0, 0.5, 0.7), ("step", -1, -1, 0.8, 0.9))


def write_timeline(folder: Path, *steps: tuple[int, Sequence[tuple[str, int, int, float, float]]]) -> None:
    """Write the times of steps that last from 0 to 1 s, as a rank does."""
    timed = tuple(TimedStep(step, 0.0, 1.0, 1.0, tuple(TimedSpan(*each) for each in spans)) for step, spans in steps)
    facts: dict[str, Any] = {"version": 1, "attempt": "", "layout": "", "rank": 0, "world": 1, "device": "cuda", "machine": ""}
    write_rank_timeline(folder, RankTimeline(**facts, cores=(), threads=1, clock_error=0.0, steps=timed))


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (((3, SPANS), (4, SPANS)), []),
        (((3, SPANS),), ["the timeline has the steps [3]"]),
        (((3, SPANS), (4, SPANS[:2] + SPANS[3:])), ["step 4 of the timeline has the spans F B B step"]),
        (((3, SPANS), (4, (*SPANS[:-1], ("step", -1, -1, 0.8, 1.1)))), ["a span of step 4 of the timeline lies outside of the step"]),
        (((3, SPANS), (4, (*SPANS[:-1], ("step", -1, -1, 0.9, 0.8)))), ["a span of step 4 of the timeline lies outside of the step"]),
        (
            ((3, SPANS), (4, tuple((kind, micro, part, 0.5, 0.51) for kind, micro, part, *_ in SPANS))),
            ["passes take 0.050000 of the 1.000000 s of step 4 in the timeline"],
        ),
    ],
)
def test_a_timeline_that_can_not_be_is_named(steps: Any, found: list[str], tmp_path: Path) -> None:
    write_timeline(tmp_path, *steps)
    assert list(options.timeline_departures(tmp_path)) == found


FAR = [5.5, 5.4, 5.27]
OTHERS = {f"option.{option.replace(' ', '.')}{place}": FAR for option in options.OTHER_CURVES for place in ("", ".cpu")}
NESTED = {f"option.{option.replace(' ', '.')}{place}": [5.5, 5.4, 5.0] for option in options.UNLIKE for place in ("", ".cpu")}
BYTES = {"plain": 100.0, "moments.in.bf16": 74.0}


@pytest.mark.parametrize(
    ("check", "changed", "found"),
    [
        (options.compare_same_curves, {}, []),
        (options.compare_same_curves, {"option.zero3": FAR}, ["zero3 is 0.55 % from what it must be"]),
        (options.compare_same_curves, {"option.zero3": [5.5, nan, 5.3]}, ["zero3 is nan % from what it must be"]),
        (options.compare_same_curves, {"option.zero3": "zero3: fit ended with 1: no"}, ["zero3: fit ended with 1: no"]),
        (options.compare_same_curves, {"option.timeline": "timeline: no"}, ["timeline: no"]),
        (options.compare_same_curves, {"option.GPT": FAR, "option.compiled.layers.of.GPT": FAR}, []),
        (options.compare_same_curves, {"option.GPT": FAR}, ["compiled layers of GPT is 0.55 % from what it must be"]),
        (options.compare_same_curves, {"option.GPT": "GPT: no"}, ["GPT: no"]),
        (options.compare_same_curves, {"option.moments.in.bf16": "moments: no"}, ["moments: no"]),
        (options.compare_other_curves, {**OTHERS, **NESTED}, []),
        (
            options.compare_other_curves,
            {**OTHERS, **NESTED, "option.muon": LOSSES},
            ["muon is 0.55 % from what it must be", "muon trains the curve of plain"],
        ),
        (
            options.compare_other_curves,
            {**OTHERS, **NESTED, "option.muon": LOSSES, "option.muon.cpu": LOSSES},
            ["muon trains the curve of plain"],
        ),
        (
            options.compare_other_curves,
            {**OTHERS, **NESTED, "option.documents": FAR, "option.documents.cpu": FAR},
            ["documents trains the curve of text"],
        ),
        (options.compare_other_curves, {**OTHERS, **NESTED, "option.preferences": "preferences: no"}, ["preferences: no"]),
        (options.compare_other_curves, {**OTHERS, **NESTED, "option.text.cpu": "text: no"}, ["text: no"]),
        (
            quantized_folder.compare_starts,
            {"from.quantized": FAR, "from.cpu": FAR},
            ["the first loss from quantized weights is 0.0e+00 nats from that of plain ones"],
        ),
        (quantized_folder.compare_starts, {"from.quantized": [5.51, 5.4, 5.3], "from.cpu": [5.51, 5.4, 5.3]}, []),
        (
            quantized_folder.compare_starts,
            {"from.quantized": [5.51, 5.4, 5.3], "from.cpu": [5.51, 5.4, 5.3003]},
            ["from quantized weights, losses are 3.0e-04 nats from the CPU's"],
        ),
        (
            quantized_folder.compare_starts,
            {"from.quantized": [5.6, 5.4, 5.3], "from.cpu": [5.6, 5.4, 5.3]},
            ["the first loss from quantized weights is 1.0e-01 nats from that of plain ones"],
        ),
    ],
)
def test_options_that_train_another_curve_are_named(
    check: Callable[[CheckContext], Finding], changed: dict[str, Any], found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that did not train is named, and the others are compared all the same."""
    for module in (options, quantized_folder):
        train_by(changed, module, tmp_path, monkeypatch)
    write_timeline(tmp_path, (3, SPANS), (4, SPANS))
    held = iter(BYTES.values())
    monkeypatch.setattr(options, "_optimizer_bytes", lambda trained: next(held))
    assert list(check(CheckContext(folder=tmp_path, on_gpu=True)).departures) == found


WEIGHTS, AVERAGES = (5.51, 5.49), (5.54, 5.52)  # validation losses
OF_OTHERS = {
    f"option.further.{name.replace(' ', '.')}{place}": FAR
    for name in ("hybrid", "hybrid by fla", "hybrid in fp8", "LoRA", "offloaded zero3 of a large model", "large")
    for place in ("", ".cpu")
}
OF_ADAPTED = {
    f"option.further.{name}{place}": [5.5, 5.4, 5.0] for name in ("LoRA.of.a.hybrid", "LoRA.with.dropout") for place in ("", ".cpu")
}


@pytest.mark.parametrize(
    ("changed", "averages", "found"),
    [
        ({}, AVERAGES, []),
        ({"option.further.offloaded.zero3": FAR}, AVERAGES, ["offloaded zero3 is 0.55 % from what it must be"]),
        ({"option.further.moments.in.8.bits": [5.5, nan, 5.3]}, AVERAGES, ["moments in 8 bits is nan % from what it must be"]),
        ({"option.further.moments.in.8.bits": "moments: no"}, AVERAGES, ["moments: no"]),
        (
            {"option.further.offloaded.zero3.of.a.large.model": [5.5, 5.4, 5.2]},
            AVERAGES,
            ["offloaded zero3 of a large model is 1.27 % from what it must be"],
        ),
        ({"option.further.hybrid.in.fp8": [5.5, 5.4, 5.1]}, AVERAGES, ["hybrid in fp8 is 3.09 % from what it must be"]),
        (
            {"option.further.LoRA.with.dropout": FAR, "option.further.LoRA.with.dropout.cpu": FAR},
            AVERAGES,
            ["LoRA with dropout trains the curve of LoRA"],
        ),
        ({"option.further.average.of.the.weights": "average: no"}, AVERAGES, ["average: no"]),
        ({}, (5.54, 5.5), ["the average of the weights is 0.36 % from what it must be"]),
        (
            {},
            WEIGHTS,
            ["the average of the weights is 0.54 % from what it must be", "the average of the weights is validated as the weights are"],
        ),
        ({}, (), ["the average of the weights was validated 0 times, 2 on the CPU"]),
    ],
)
def test_further_ways_that_train_another_curve_are_named(
    changed: dict[str, Any], averages: Sequence[float], found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_runs = {**OF_OTHERS, **OF_ADAPTED, **changed}

    def fits(runs: Sequence[FitRun], context: CheckContext) -> tuple[dict[str, FinishedFit], dict[str, str]]:
        ended = {run.name: of_runs.get(run.name, LOSSES) for run in runs}
        return {name: finished(name, each) for name, each in ended.items() if not isinstance(each, str)}, {
            name: each for name, each in ended.items() if isinstance(each, str)
        }

    def finished(name: str, losses: Sequence[float]) -> FinishedFit:
        shown = AVERAGES if name.endswith(".cpu") else averages
        validated = (
            [{VALIDATION_KEY: one, AVERAGED_KEY: other} for one, other in zip(WEIGHTS, shown, strict=False)] if "average" in name else []
        )
        rows = tuple({"loss": loss, **(validated[at] if at < len(validated) else {})} for at, loss in enumerate(losses))
        return FinishedFit(folder=tmp_path, rows=rows, plan={})

    monkeypatch.setattr(further_curves, "fit_each", fits)
    context = CheckContext(folder=tmp_path, on_gpu=True, gpu="NVIDIA H200")
    assert list(further_curves.compare_further_ways(context).departures) == found


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the further ways that are begun, each of which fails."""
    names = list[str]()

    def fits(runs: Sequence[FitRun], context: CheckContext) -> tuple[dict[str, FinishedFit], dict[str, str]]:
        names.extend(run.name for run in runs)
        return {}, {run.name: "no" for run in runs}

    monkeypatch.setattr(further_curves, "fit_each", fits)
    return names


def test_further_ways_on_a_gpu_without_fp8(tmp_path: Path, begun: list[str]) -> None:
    for context in (CheckContext(folder=tmp_path, on_gpu=True, gpu="NVIDIA A100-SXM4-80GB"), CheckContext(folder=tmp_path, on_gpu=False)):
        with pytest.raises(CheckBroken, match="no; no"):
            further_curves.compare_further_ways(context)
    assert begun.count("option.further.hybrid.in.fp8") == begun.count("option.further.large") == 1  # a CPU computes fp8 in another type
    assert len(set(begun)) < len(begun)


def test_a_hybrid_by_fla_is_tried_where_its_packages_are(tmp_path: Path, begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_machine, "package_version", lambda name: "3.7.1")
    for installed, gpu in ((None, "NVIDIA H200"), ("fla", ""), ("fla", "NVIDIA H200")):
        monkeypatch.setattr(admission, "find_spec", lambda name, installed=installed: installed)
        with pytest.raises(CheckBroken, match="no; no"):
            further_curves.compare_further_ways(CheckContext(folder=tmp_path, on_gpu=bool(gpu), gpu=gpu))
    assert begun.count("option.further.hybrid.by.fla") == 1
    assert begun.count("option.further.hybrid") == 3


def test_moments_that_take_as_many_bytes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_by({}, options, tmp_path, monkeypatch)
    write_timeline(tmp_path, (3, SPANS), (4, SPANS))
    monkeypatch.setattr(options, "_optimizer_bytes", lambda trained: 100.0)
    found = options.compare_same_curves(CheckContext(folder=tmp_path, on_gpu=True)).departures
    assert found == ("moments in bf16 take 100.0 bytes with the weights, where plain ones take 100.0",)


def test_without_what_others_are_compared_with_a_check_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((options, "option.plain"), (loss_checks, "bf16.zero1")):
        train_by({name: f"{name}: no"}, module, tmp_path, monkeypatch)
    with pytest.raises(CheckBroken, match=r"option\.plain: no"):
        options.compare_same_curves(CheckContext(folder=tmp_path, on_gpu=True))
    with pytest.raises(CheckBroken, match=r"bf16 zero1 did not train: bf16\.zero1: no"):
        loss_checks.train_zero_stages(CheckContext(folder=tmp_path, on_gpu=True))


def test_a_run_that_fails_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = FinishedFit(folder=tmp_path, rows=(), plan={})

    def fit(run: FitRun, context: CheckContext, variables: Mapping[str, str] | None) -> FinishedFit:
        if run.name != "good":
            raise CheckBroken(f"{run.name}: no")
        return trained

    monkeypatch.setattr(fit_runs, "fit", fit)
    runs, context = [FitRun(name=name, recipe="") for name in ("bad", "good", "worse")], CheckContext(folder=tmp_path, on_gpu=False)
    assert fit_each(runs, context) == ({"good": trained}, {"bad": "bad: no", "worse": "worse: no"})
    with pytest.raises(CheckBroken, match="bad: no; worse: no"):
        fit_together(runs, context)
    assert fit_together(runs[1:2], context) == {"good": trained}


def test_a_quantized_folder_has_other_values_near_the_plain_ones(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    save_file({"a.q_proj.weight": weight, "a.norm.weight": weight[0].clone()}, plain / "model.safetensors")
    (plain / "config.json").write_text('{"hidden_size": 8}')
    assert quantized_folder.quantize_folder(plain, packed) == 1
    config = json.loads((packed / "config.json").read_text())
    assert (config["hidden_size"], config["quantization_config"]["quant_method"]) == (8, "fp8")
    found = load_file(packed / "model.safetensors")
    assert set(found) == {"a.q_proj.weight", "a.q_proj.weight_scale_inv", "a.norm.weight"}
    values = found["a.q_proj.weight"].float() * found["a.q_proj.weight_scale_inv"]
    assert 0.001 < (values - weight).abs().max() < 0.0625 * weight.abs().max()
    assert torch.equal(found["a.norm.weight"], weight[0])


SLOW_PRODUCTS = [
    f"a product in {each}: calibrate measured 3, the check of the machine 4" for each in ("bf16", "fp32")
]  # of one of two GPUs


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"products": [{"precision": each, "side": 8192, "rates": [4.0, 3.0]} for each in ("bf16", "fp32")]}, SLOW_PRODUCTS),
        ({"copies": [2.0, 0.8]}, ["a copy: calibrate measured 0.8, the check of the machine 1"]),
        ({"products": []}, [f"a product in {each}: calibrate measured 0, the check of the machine 4" for each in ("bf16", "fp32")]),
    ],
)
def test_rates_that_calibrate_measures_otherwise_are_named(changed: dict[str, Any], found: list[str], tmp_path: Path) -> None:
    machine = {"matrix product, FLOP/s": {"bfloat16": 4.0, "float32": 4.0}, "copy, bytes/s read and written": 1.0}
    rows = [
        {"precision": each, "side": side, "rates": [4.4, 4.2]} for each in ("bf16", "fp16", "fp32") for side in (4096, calibration.SIDE)
    ]
    measured = {"products": rows, "copies": [1.1, 1.0], **changed}
    context = CheckContext(folder=tmp_path, on_gpu=True, earlier={"machine": machine})
    assert calibration.rate_departures(context, measured) == found
    assert calibration.rate_departures(replace(context, on_gpu=False), measured) == []


def test_every_check_has_a_function() -> None:
    for check in CHECKS:
        assert callable(resolve_name(check.function)), check.name
