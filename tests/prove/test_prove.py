"""Real proofs: layouts that train the same curve, layouts that go wrong, their documents, and the fork server that trains them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distrain.cli.verbs.prove_run import RecipeForRanks
from distrain.tests.fakes.deadline import DEADLINE, wait_for
from distrain.tests.fakes.processes import marked_processes
from distrain.tests.fakes.prove_screen import TINY, ScreenRecord, run_prove
from distrain.tests.fakes.rank_pool import RankPool, choose_program
from distrain.trainer.prove.fork_client import START_AFRESH, ForkServer, ServerGone
from distrain.trainer.prove.trials.layouts import ProveLayout
from distrain.trainer.prove.trials.plan_proof import ProveRequest, plan_proof
from distrain.trainer.prove.trials.trial import write_run_folder
from distrain.trainer.system.child_process import end_child

WIDE = 100  # columns, so that a row is a line


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(WIDE))
        yield


# Layouts that train the same curve


@pytest.fixture(scope="module")
def fine(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[ScreenRecord, Path]:
    """A proof of four layouts, and its folder."""
    top = tmp_path_factory.mktemp("fine")
    arguments = ["layouts=dp2,dp4.zero3,tp2.sequence,dp2.tp2.zero1", "steps=3"]
    return run_prove(arguments, top, lambda *_: nullcontext(ranks.server)), top / "quickstart.prove"


def test_layouts_that_train_the_same_curve_are_shown_and_exit_with_0(fine: tuple[ScreenRecord, Path]) -> None:
    record, _ = fine
    assert (record.status, record.problems) == (0, [])
    assert re.fullmatch(r"4 layouts train the same curve: losses (within \S+|equal to the last bit) over 3 steps", record.lines[-1])
    assert max(map(len, record.lines)) <= WIDE
    assert record.row("dp4.zero3")[:4] == ["dp4.zero3", "1", "x", "2"]
    assert record.row("tp2.sequence")[-1] == "same"
    assert "not compared, gradient only rounding: layers.0.attention.key.bias and 1 more" in record.lines
    assert "micro-batch below 4, so that every replica and stage works: dp4.zero3" in record.lines
    assert "4/4 dp2.tp2.zero1: step 3 of 3" in record.live


def test_a_proofs_document_has_every_figure(fine: tuple[ScreenRecord, Path]) -> None:
    _, folder = fine
    document = json.loads((folder / "prove.json").read_text())
    assert (document["version"], document["ok"], document["steps"], document["precision"]) == (1, True, 3, "fp32")
    assert [each["layout"] for each in document["layouts"]] == ["dp2", "dp4.zero3", "tp2.sequence", "dp2.tp2.zero1"]
    for each in document["layouts"]:
        assert len(each["losses"]) == len(each["grad_norms"]) == 3
        assert 0 <= each["apart"]["loss"] <= 2e-6  # two roundings of a loss of 5.5
        assert 0 <= each["apart"]["grad_norm"] <= 1e-5
        assert 0 <= each["apart"]["weights"] <= document["tolerance"]["weights"]
        assert each["mesh"]["dp"] * each["mesh"]["tp"] == each["ranks"]
        assert 0 <= each["apart"]["evaluation"] <= 2e-6
        assert each["samples"] == ""
    assert document["alone"]["losses"][0] > document["alone"]["losses"][-1]
    assert document["checks"] == []  # where layouts are named
    assert set(document["untested"]) >= {"dropout", "experts", "documents", "windows", "a resume", "other micro-batches"}
    assert document["not_compared"] == ["layers.0.attention.key.bias", "layers.1.attention.key.bias"]


def test_a_proof_leaves_curves_and_no_checkpoints(fine: tuple[ScreenRecord, Path]) -> None:
    _, folder = fine
    assert {each.parent.name for each in folder.glob("*/metrics.jsonl")} == {"dp1", "dp2", "dp4.zero3", "tp2.sequence", "dp2.tp2.zero1"}
    assert not list(folder.glob("*/checkpoints"))


@pytest.fixture(scope="module")
def checked(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[ScreenRecord, Path]:
    """A proof of two layouts with its checks, and its folder."""
    top = tmp_path_factory.mktemp("checked")
    arguments = ["layouts=dp2.zero1,tp2", "steps=4", "checks=all"]
    return run_prove(arguments, top, lambda *_: nullcontext(ranks.server)), top / "quickstart.prove"


def test_other_micro_batches_and_a_resume_in_another_layout_are_rows_of_their_own(checked: tuple[ScreenRecord, Path]) -> None:
    record, folder = checked
    assert (record.status, record.problems) == (0, [])
    assert [line.split("  ")[0] for line in record.lines if line.endswith("same")] == ["dp2.zero1", "tp2", "one process", "tp2 resumed"]
    assert any(line.startswith("resumed: from step 2 of dp2.zero1; evaluation at the end: losses within ") for line in record.lines)
    document = json.loads((folder / "prove.json").read_text())
    assert [(each["check"], each["verdict"], len(each["losses"])) for each in document["checks"]] == [
        ("microbatch", "same", 4),
        ("resume", "same", 4),
    ]
    assert not list(folder.glob("*/checkpoints"))


def test_a_page_ends_with_what_the_recipe_leaves_untested(checked: tuple[ScreenRecord, Path]) -> None:
    output = " ".join(" ".join(checked[0].lines).split())
    assert re.search(r"untested here: dropout, grouped heads, .*documents; distrain prove conf=tiny_full has them all", output)
    assert "a resume" not in output


def test_layouts_of_engine_native_train_the_curve_of_another_engine_and_resume_its_run(ranks: RankPool, tmp_path: Path) -> None:
    arguments = ["model.layers=4", "layouts=dp2.zero3,dp2.zero1.native,pp2.zb_h1,pp2.interleaved", "steps=2", "checks=all"]
    record = run_prove(arguments, tmp_path, lambda *_: nullcontext(ranks.server))
    assert record.status == 0
    assert "native: our own engine where another is the default" in "\n".join(record.lines)
    document = json.loads((tmp_path / "quickstart.prove" / "prove.json").read_text())
    assert document["alone"]["engine"] == "zero"
    assert [each["engine"] for each in document["layouts"]] == ["zero", "native", "native", "native"]
    assert {each["messages"]["verdict"] for each in document["layouts"] if each["engine"] == "native"} == {"equal"}
    assert (document["checks"][-1]["check"], document["checks"][-1]["engine"]) == ("resume", "native")  # of what dp2.zero3 saved


def test_json_output_is_one_document(ranks: RankPool, tmp_path: Path) -> None:
    record = run_prove(["layouts=dp2", "steps=1"], tmp_path, lambda *_: nullcontext(ranks.server), as_json=True)
    (document,) = record.shown
    assert (record.status, json.loads(document)["ok"]) == (0, True)


# Layouts that go wrong

SPOILED = ("dp2.zero1=faster", "dp2.zero2=same_samples", "dp2.zero3=dies")
DELAYED_SPOILED = ("pp2.pipedream=newest_in_backward", "pp2.pipedream.full=one_later", "dp2.pp2.pipedream=larger_norm")
COMPRESSED_SPOILED = "dp2.powersgd4=lost_error"
QUIETLY_SPOILED = (  # fault, its verdict, what is said of it
    ("dp2=no_finite_check",     "messages", r"control all_reduce: counted 0 of 4 B, planned 1 \(finite check 1\)"),
    ("dp2.zero1=extra_sum",     "messages", r"control all_reduce: counted 4 of 4 B, planned 3 \(finite check 1, gradient norm 2\)"),
    ("tp2=no_norm_sum",         "departs",  r"first: step 1: gradients agree \(within \S+ of the largest value\), their norm does not"),
    ("dp2.zero2=louder_report", "departs",  r"first: step 1: outputs and gradients agree \(.*\), the reported loss does not: off by \S+"),
    ("pp2.native=extra_native_sum",    "messages", r"control all_reduce: counted 1 of 4 B, planned 0"),
    ("tp2.native=small_native_norm", "departs", r"first: step 1: gradients agree \(within \S+ of the largest value\), their norm does not"),
    ("dp2.zero3=same_evaluation", "departs", r"evaluation departs by \S+, though training agrees"),
)  # fmt: skip


@pytest.fixture(scope="module")
def wrong(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[ScreenRecord, Path]:
    """A proof in which three of four layouts go wrong, three of four whose weights are late, and one of two that compress gradients, and
    its folder."""
    top = tmp_path_factory.mktemp("wrong")
    spoiled = (*SPOILED, *DELAYED_SPOILED, COMPRESSED_SPOILED)
    layouts = ",".join(["dp2", "pp2.pipedream_2bw", "dp2.powersgd2", *(each.split("=")[0] for each in spoiled)])
    arguments = [f"layouts={layouts}", "steps=4", "optim.warmup=0", "model.tied=false"]
    choose_program(top, "spoiled", dict(each.split("=") for each in spoiled))
    return run_prove(arguments, top, lambda *_: nullcontext(ranks.server), reasons=True), top / "quickstart.prove"


def test_layouts_that_go_wrong_are_named_and_exit_with_1(wrong: tuple[ScreenRecord, Path]) -> None:
    record, folder = wrong
    assert record.status == 1
    assert "3 of 10 layouts do not train the same curve: dp2.zero1, dp2.zero2, dp2.zero3" in " ".join(" ".join(record.lines[-4:]).split())
    assert [record.row(layout)[-1] for layout in ("dp2", "dp2.zero1", "dp2.zero2", "dp2.zero3")] == ["same", "departs", "departs", "failed"]
    document = json.loads((folder / "prove.json").read_text())
    verdicts = {each["layout"]: each["verdict"] for each in document["layouts"] if each["held_to"] == "one process"}
    assert verdicts == {"dp2": "same", "dp2.zero1": "departs", "dp2.zero2": "departs", "dp2.zero3": "failed"}
    assert not document["ok"]


def test_replicas_that_read_the_same_samples_are_found_at_the_first_step(wrong: tuple[ScreenRecord, Path]) -> None:
    record, folder = wrong
    output = " ".join(" ".join(record.lines).split())
    assert re.search(r"dp2.zero2: loss departs at step 1 by \S+; rounding explains 1.0e-05; the gradient norm", output)
    twice, never = "samples 0, 1, 2 and 1 more are read more than once", "samples 4, 5, 6 and 1 more are read never"
    assert f"dp2.zero2: samples: step 1: {twice}; {never}" in output
    assert any(line.startswith("dp2.zero2: first: step 1, micro-batch 1, embedding on rank 1 (dp 1): its output ") for line in record.lines)
    assert not (folder / "dp1.traced").exists()
    assert (folder / "dp2.zero2" / "checkpoints").is_dir()  # kept for the user to look at
    assert (folder / "dp1" / "checkpoints").is_dir()
    assert not (folder / "dp2" / "checkpoints").is_dir()


def test_a_learning_rate_that_is_1_percent_off_is_found(wrong: tuple[ScreenRecord, Path]) -> None:
    lines = wrong[0].lines
    assert any(re.match(r"dp2.zero1: loss departs at step [23] by", line) for line in lines)
    assert any(re.match(r"dp2.zero1: first: after step 1, \S+ on rank [01] \(dp [01]\): it differs from", line) for line in lines)


def test_compressed_gradients_are_held_to_a_simulation_and_a_lost_error_is_found(wrong: tuple[ScreenRecord, Path]) -> None:
    record, folder = wrong
    assert [record.row(name)[-1] for name in ("dp2.powersgd2", "dp2.powersgd4")] == ["same", "departs"]
    output = " ".join(" ".join(record.lines).split())
    assert "1 of 10 layouts does not train the curve of compressed gradients, another one by design: dp2.powersgd4" in output
    assert "powersgd: gradients as two factors of this rank, another curve by design; one process simulates it" in output
    document = json.loads((folder / "prove.json").read_text())
    held = {each["layout"]: each["messages"]["verdict"] for each in document["layouts"] if each["held_to"] == "compressed gradients"}
    assert held == {"dp2.powersgd2": "equal", "dp2.powersgd4": "equal"}


def test_late_weights_are_held_to_delayed_gradients_and_errors_in_them_are_found(wrong: tuple[ScreenRecord, Path]) -> None:
    """A backward with other weights than its forward, a delay that is an update too long, a clip by more than a stage's own norm."""
    record, folder = wrong
    names = [each.split("=")[0] for each in DELAYED_SPOILED]
    assert [record.row(name)[-1] for name in ("pp2.pipedream_2bw", *names)] == ["same", "departs", "departs", "departs"]
    output = " ".join(" ".join(record.lines).split())
    assert "gradients of older weights, another curve by design; one process simulates it" in output
    assert f"3 of 10 layouts do not train the curve of delayed gradients, another one by design: {', '.join(names)}" in output
    document = json.loads((folder / "prove.json").read_text())
    assert {each["layout"] for each in document["layouts"] if each["held_to"] == "delayed gradients"} == {"pp2.pipedream_2bw", *names}


def test_a_rank_that_dies_is_named_with_its_cause(wrong: tuple[ScreenRecord, Path]) -> None:
    output = " ".join(line.strip() for line in wrong[0].lines)
    assert "dp2.zero3: rank 1 exited with 1, at step 2: ArithmeticError: what a rank may raise; its log is " in output


@pytest.fixture(scope="module")
def quietly_wrong(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> ScreenRecord:
    """A proof in which each layout trains the right weights and does something else wrong."""
    top, faults = tmp_path_factory.mktemp("quiet"), dict(fault.split("=") for fault, *_ in QUIETLY_SPOILED)
    choose_program(top, "spoiled", faults)
    return run_prove([f"layouts={','.join(faults)}", "steps=2"], top, lambda *_: nullcontext(ranks.server))


@pytest.mark.parametrize(("fault", "verdict", "says"), QUIETLY_SPOILED, ids=[fault for fault, *_ in QUIETLY_SPOILED])
def test_a_fault_that_leaves_the_weights_right_is_found_and_named(quietly_wrong: ScreenRecord, fault: str, verdict: str, says: str) -> None:
    layout = fault.partition("=")[0]
    assert quietly_wrong.status == 1
    assert quietly_wrong.row(layout)[-1] == verdict
    assert re.search(rf"{layout}: [^:]*:? ?{says}", " ".join(" ".join(quietly_wrong.lines).split()))


def test_layouts_that_only_send_other_messages_are_counted_apart(quietly_wrong: ScreenRecord) -> None:
    verdict = " ".join(" ".join(quietly_wrong.lines[-2:]).split())
    assert "4 of 7 layouts do not train the same curve: " in verdict
    assert verdict.endswith("; 3 of 7 layouts send other messages than the plan says: dp2, dp2.zero1, pp2.native")


# The fork server


def test_a_server_that_ends_is_one_problem(tmp_path: Path) -> None:
    record = run_prove(["layouts=dp2"], tmp_path, partial(ForkServer, command=[sys.executable, "-c", "raise SystemExit(3)"]))
    assert record.status == 1
    assert record.problems == [f"the process that starts the ranks ended with 3; its log is {tmp_path}/quickstart.prove/server.log"]


def test_ranks_that_pass_their_deadline_are_killed(ranks: RankPool, tmp_path: Path) -> None:
    """The second may have ended before its signal comes, since the first one's death broke their connection."""
    recipe = RecipeForRanks("quickstart", [*TINY[1:], f"log.dir={tmp_path}"], None)
    request = ProveRequest(steps=100_000, chosen="named", layouts=(ProveLayout(dp=2),))
    (trial,) = plan_proof(request, recipe.run(), recipe.run_on).trials
    write_run_folder(trial)
    began = time.monotonic()
    result = ranks.server.run_job(trial.folder / "run.json", 2, seconds=3.0)
    assert (result.timed_out, result.codes[0]) == (True, -signal.SIGKILL)
    assert result.codes[1] in (-signal.SIGKILL, 1)
    assert time.monotonic() - began < DEADLINE


def test_ranks_of_gpus_are_processes_of_their_own(tmp_path: Path) -> None:
    """Two of them train on a CPU as forked ones do; their messages and their end are the server's."""
    recipe = RecipeForRanks("quickstart", [*TINY[1:], f"log.dir={tmp_path}"], None)
    (trial,) = plan_proof(ProveRequest(steps=2, chosen="named", layouts=(ProveLayout(dp=2),)), recipe.run(), recipe.run_on).trials
    write_run_folder(trial)
    afresh = {**os.environ, "CUDA_VISIBLE_DEVICES": "", START_AFRESH: "1"}
    said: list[Mapping[str, Any]] = []
    with ForkServer(tmp_path / "log", afresh) as server:
        result = server.run_job(trial.folder / "run.json", 2, on_message=said.append)
    assert (result.codes, result.steps, result.problems) == ((0, 0), (1, 1), ())
    assert [each["step"] for each in said if "step" in each] == [0, 1]
    assert len(list((trial.folder / "ranks").glob("*.log"))) == 2


def test_a_question_that_cannot_be_answered_says_why(ranks: RankPool, tmp_path: Path) -> None:
    reply = ranks.server.ask("weight_difference", reference=str(tmp_path), layout=str(tmp_path))
    assert reply == {"failed": f"{tmp_path.name} has saved nothing"}


def test_a_killed_server_is_noticed(tmp_path: Path) -> None:
    with ForkServer(tmp_path / "log") as server:
        os.kill(server._child.pid, signal.SIGKILL)
        with pytest.raises(ServerGone, match="was killed by signal 9"):
            server.ask("weight_difference")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_the_command_ends_all_its_processes_end(tmp_path: Path, number: int) -> None:
    arguments = [*TINY, "layouts=dp2", "steps=100000", f"log.dir={tmp_path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PROVE_TEST": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-m", "distrain", "prove", *arguments], env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: (tmp_path / "quickstart.prove" / "dp1" / "metrics.jsonl").exists())
        assert len(marked_processes("PROVE_TEST", tmp_path)) >= 3  # the command, the server, a rank
        process.send_signal(number)
        assert process.wait(DEADLINE) == (-number if number == signal.SIGKILL else 128 + number)
        wait_for(lambda: not marked_processes("PROVE_TEST", tmp_path))
    finally:
        end_child(process)
