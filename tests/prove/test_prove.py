"""`distrain prove`: its words, which layouts it takes, what it says of those that train the same curve and of those that don't."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distrain.cli.app import command
from distrain.cli.config.layout_words import read_asked, read_layouts
from distrain.cli.config.load import load
from distrain.cli.verbs.prove import Screen, prove
from distrain.trainer.loop.forkserver.weight_diff import without_gradient
from distrain.trainer.prove.covering import covering, pairs
from distrain.trainer.prove.fork_client import Crew, Server, ServerGone
from distrain.trainer.prove.layouts import FEW, SIMPLE, Layout, every, few, laid, microbatch, own
from distrain.trainer.prove.runs import Close, Curve, Outcome, Proved, at_steps, control, ended, slight, widened
from distrain.trainer.prove.trials import Recipe, prepared, room, written
from distrain.trainer.system.end_child import end_child

if TYPE_CHECKING:
    from distrain.tests.conftest import Ranks

TINY = (
    "conf=quickstart", "model=tiny", "model.layers=2", "data=synthetic", "train.batch=8", "train.seq=16", "train.microbatch=4",
    "parallel.zero=1",
)  # fmt: skip
SERVER = Path(__file__).parents[1] / "rank_programs" / "spoiled_ranks.py"

# Words

# fmt: off
WRONG = (
    ("steps=0",                  "steps=0 is not a whole number, at least 1"),
    ("steps=many",               "steps=many is not a whole number, at least 1"),
    ("steps=3 steps=4",          "steps is given 2 times: give it once"),
    ("layouts=",                 ("layouts= names no layout: write all, or degrees as dp2, tp2, cp2, pp2 or ep2 and flags as zero1, "
                                  "sequence, gpipe or full, joined by dots: dp2.tp2.zero1")),
    ("layouts=dp0",              "layouts: dp0 is no layout: a degree is at least 1, as dp2"),
    ("layouts=dp",               "layouts: dp is no layout: a degree is at least 1, as dp2"),
    ("layouts=dp2.zero4",        "layouts: dp2.zero4 is no layout: the stages are zero0 to zero3"),
    ("layouts=dp2..tp2",         "layouts: dp2..tp2 is no layout: a dot stands between two words"),
    ("layouts=pp2.gpip",         "layouts: pp2.gpip is no layout: did you mean gpipe?"),
    ("layouts=sequance.tp2",     "layouts: sequance.tp2 is no layout: did you mean sequence?"),
    ("layouts=dp2.dp4",          "layouts: dp2.dp4 says dp twice: say it once"),
    ("layouts=pp2.1f1b.gpipe",   "layouts: pp2.1f1b.gpipe says schedule twice: say it once"),
    ("layouts=dp2.gpipe",        "layouts: dp2.gpipe has a schedule, gpipe, and one stage: write dp2.gpipe.pp2"),
    ("layouts=dp2.sequence",     "layouts: dp2.sequence splits the sequence over tensor ranks, and has one: write dp2.sequence.tp2"),
    ("layouts=dp1",              "layouts: dp1 is the one process that all others are held against: leave it out, or add a degree: dp2"),
    ("layouts=dp2,tp2 train.stops=1", "no key train.stops: did you mean train.steps?"),
)
# fmt: on


@pytest.mark.parametrize(("words", "line"), WRONG, ids=[words for words, _ in WRONG])
def test_wrong_words_are_a_line_each(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = command(["prove", "conf=quickstart", *words.split()])
    said = capsys.readouterr()
    assert (status, said.out, said.err) == (2, "", f"distrain: {line}\n")


def test_all_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["prove", "layouts=dp0,zero9", "steps=x", "parallel.tpp=2"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 5


def test_the_words_of_prove_are_taken_out_of_the_recipes() -> None:
    asked, rest, problems = read_asked(["conf=quickstart", "layouts=[dp2, tp2,dp2]", "steps=3", "train.steps=5"])
    assert (asked.steps, asked.chosen, [each.word for each in asked.layouts]) == (3, "named", ["dp2", "tp2"])
    assert (rest, problems) == (["conf=quickstart", "train.steps=5"], [])
    assert read_asked(["layouts=all"])[0].chosen == "all"
    assert read_asked([])[0].chosen == "few"


def test_a_layouts_word_reads_as_that_layout() -> None:
    for layout in every(16, experts=True):
        for each in (layout, replace(layout, recompute="selective")):
            assert read_layouts(each.word) == [each]
    assert read_layouts("pp2.full.zero0.1f1b") == [Layout(pp=2, recompute="full")]


# Which layouts


def test_every_layout_has_its_ranks_and_only_flags_that_it_can_have() -> None:
    found = list(every(8))
    assert len(set(found)) == len(found)
    assert {each.ranks for each in found} == {2, 4, 8}
    assert all(each.tp > 1 for each in found if each.sequence)
    assert all(each.dp * each.cp > 1 for each in found if each.zero)
    assert {each.ep for each in found} == {1}
    assert {each.ep for each in every(8, experts=True) if each.dp == 4} == {1, 2, 4}
    assert list(every(1)) == []


def test_covering_rows_have_every_pair_and_are_few() -> None:
    rows = list(product("abc", range(4), (False, True)))
    chosen = list(covering(rows))
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, rows))
    assert len(chosen) == 12  # 3 x 4: every pair of the two largest factors takes a row
    assert list(covering(rows, taken=rows)) == []


def test_few_layouts_begin_with_what_each_axis_does_alone_and_never_repeat() -> None:
    found = list(every(8))
    mine = Layout(dp=2, tp=2, pp=2, zero=1)
    chosen = few(found, [mine, *SIMPLE])
    assert len(chosen) == len(set(chosen)) == FEW
    assert {mine, *SIMPLE} <= set(chosen)
    assert [each.ranks for each in chosen] == sorted(each.ranks for each in chosen)
    alone = {each.choices for each in found if each.ranks == 2}
    assert len(few([each for each in found if each.choices in alone], [])) <= len(alone)


def test_a_recipes_own_layout_is_among_them() -> None:
    assert own(load("tiny_2x2x2")) == Layout(dp=2, tp=2, pp=2, zero=1)
    assert own(load("quickstart")) == Layout(dp=2, zero=1)
    assert own(load("quickstart", ["cluster.gpus=1"])) == Layout(zero=1)
    assert own(load("quickstart", ["parallel.pp=2", "cluster=1x4", "parallel.schedule=interleaved", "parallel.chunks=2"])) is None
    proof = prepared(read_asked([])[0], Recipe("quickstart", [*TINY[1:], "parallel.zero=2"], None))
    assert Layout(dp=2, zero=2) in [each.layout for each in proof.trials]
    assert proof.trials[0].layout == Layout(dp=2)
    assert len(proof.trials) <= FEW


# fmt: off
MICROBATCHES = (  # batch, the recipe's micro-batch, layout -> micro-batch
    (16, 8, "dp2",     8),
    (16, 8, "dp4",     4),
    (16, 8, "dp8",     2),
    (16, 8, "pp2",     8),
    (16, 8, "pp4",     4),
    (16, 8, "dp2.pp4", 2),
    (12, 8, "dp2",     6),
    (12, 5, "tp2",     4),
    (8,  2, "dp2.pp8", 1),
    (7,  2, "dp2",     2),  # refused: a batch of 7 is shared by no two
)
# fmt: on


@pytest.mark.parametrize(("batch", "most", "word", "size"), MICROBATCHES)
def test_a_micro_batch_is_lowered_where_it_must_be(batch: int, most: int, word: str, size: int) -> None:
    run = load("quickstart", [f"train.batch={batch}", f"train.microbatch={most}"])
    (layout,) = read_layouts(word)
    assert isinstance(layout, Layout)
    assert microbatch(run, layout) == size
    assert laid(run, layout).train.batch == batch


def test_a_run_is_short_logs_every_step_and_leaves_the_recipe_alone() -> None:
    proof = prepared(read_asked(["steps=6", "layouts=dp2.full"])[0], Recipe("quickstart", [*TINY[1:], "cluster=1x4x2"], None))
    (trial,) = proof.trials
    assert (trial.run.train.steps, trial.run.optim.warmup, trial.run.log.every, trial.run.checkpoint.resume) == (6, 3, 1, "never")
    assert (trial.run.cluster.gpus, trial.run.parallel.dp, trial.run.parallel.tp, trial.run.parallel.recompute) == (2, 2, 1, "full")
    assert trial.folder == Path("runs/quickstart.prove/dp2.full").absolute()
    assert (proof.steps, proof.alone.run.parallel.dp, proof.alone.run.parallel.zero) == (6, 1, 0)


def test_a_layout_that_is_named_and_cannot_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = command(["prove", *TINY, "layouts=dp3,dp2.pp2.zero3,dp2", f"log.dir={tmp_path}"])
    said = capsys.readouterr()
    assert (status, said.out) == (1, "")
    assert [line.split(":")[1].strip() for line in said.err.splitlines()] == ["dp3", "dp2.pp2.zero3"]
    assert not list(tmp_path.iterdir())


def test_what_one_process_cannot_train_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["prove", "conf=gpt3_175b"]) == 1
    assert capsys.readouterr().err.startswith("distrain: one process")


def test_this_machine_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room(load("quickstart")) == 8
    monkeypatch.setattr("distrain.trainer.machine.facts.found", lambda: {"cuda": [{}] * 3})
    assert room(load("llama3_8b")) == 3


# What is compared


def test_a_key_bias_is_no_weight_to_compare_unless_positions_turn_the_keys() -> None:
    pattern = without_gradient(load("quickstart"))
    assert re.search(pattern, "layers.11.attention.key.bias")
    assert not re.search(pattern, "layers.11.attention.query.bias")
    assert not re.search(pattern, "layers.11.attention.key.weight")
    assert without_gradient(load("quickstart", ["model=tiny_llama"])) == ""


def crew(**given: Any) -> Crew:
    return Crew(**{"codes": (0, 0), "steps": (7, 7), "said": (), "problems": (), "late": False, "says": "", **given})


def test_how_ranks_end_is_a_verdict() -> None:
    assert ended(crew(), None) == ("same", "")
    assert ended(crew(codes=(1, 0), says="rank 0 exited with 1"), None) == ("failed", "rank 0 exited with 1")
    verdict, says = ended(crew(codes=(-9, -9, -9), steps=(3, 3, None), late=True), 90.0)
    assert verdict == "hangs"
    assert says == "had not ended after 90 s, and was killed: ranks 0, 1 in step 4; rank 2 before the first step"
    assert at_steps((0,)) == "rank 0 in step 1"


def departing(loss: float) -> Outcome:
    """A layout whose loss departs from one process at its second step."""
    trial = prepared(read_asked(["layouts=dp2"])[0], Recipe("quickstart", TINY[1:], None)).alone
    return Outcome(trial=trial, verdict="same", curve=Curve(losses=(5.0, 4.0 + loss), norms=(1.0, 1.0), rates=(1e-3, 1e-3)), loss=loss)


# Real proofs


@dataclass
class Heard:
    """What a proof showed, told and said on its live line."""

    shown: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    status: int | None = None

    @property
    def lines(self) -> list[str]:
        return "\n".join(self.shown).splitlines()

    def row(self, layout: str) -> list[str]:
        return next(line.split() for line in self.lines if line.split(" ")[0] == layout)


def proved(words: Sequence[str], folder: Path, serving: Callable[..., Any], **options: bool) -> Heard:
    heard = Heard()
    screen = Screen(show=heard.shown.append, tell=lambda problems: heard.told.extend(map(str, problems)), live=heard.live.append)
    given = {"as_json": False, "reasons": False, **options}
    heard.status = prove([*TINY, *words, f"log.dir={folder}"], None, screen, serving=serving, **given)
    return heard


WIDE = 100  # columns, so that a row is a line


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(WIDE))
        yield


@pytest.fixture(scope="module")
def fine(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Heard, Path]:
    """A proof of four layouts, and its folder."""
    top = tmp_path_factory.mktemp("fine")
    words = ["layouts=dp2,dp4.zero3,tp2.sequence,dp2.tp2.zero1", "steps=5"]
    return proved(words, top, lambda *_: nullcontext(ranks.server)), top / "quickstart.prove"


def test_layouts_that_train_the_same_curve_are_shown_and_leave_status_0(fine: tuple[Heard, Path]) -> None:
    heard, _ = fine
    assert (heard.status, heard.told) == (0, [])
    assert re.fullmatch(r"4 layouts train the same curve: losses (within \S+|equal to the last bit) over 5 steps", heard.lines[-1])
    assert max(map(len, heard.lines)) <= WIDE
    assert heard.row("dp4.zero3")[:5] == ["dp4.zero3", "zero", "-", "1", "x"]
    assert heard.row("tp2.sequence")[-1] == "same"
    assert "not compared: layers.0.attention.key.bias and 1 more, whose gradient is zero but for rounding" in heard.lines
    assert "micro-batch lowered from 4, so that replicas divide the batch and stages have work: dp4.zero3" in heard.lines
    assert "4/4 dp2.tp2.zero1: step 5 of 5" in heard.live


def test_a_proofs_document_has_every_figure(fine: tuple[Heard, Path]) -> None:
    _, folder = fine
    said = json.loads((folder / "prove.json").read_text())
    assert (said["version"], said["ok"], said["steps"], said["precision"]) == (1, True, 5, "fp32")
    assert [each["layout"] for each in said["layouts"]] == ["dp2", "dp4.zero3", "tp2.sequence", "dp2.tp2.zero1"]
    for each in said["layouts"]:
        assert len(each["losses"]) == len(each["grad_norms"]) == 5
        assert 0 <= each["apart"]["loss"] <= 2e-6  # two roundings of a loss of 5.5
        assert 0 <= each["apart"]["grad_norm"] <= 1e-5
        assert 0 <= each["apart"]["weights"] <= said["tolerance"]["weights"]
        assert each["mesh"]["dp"] * each["mesh"]["tp"] == each["ranks"]
    assert said["alone"]["losses"][0] > said["alone"]["losses"][-1]
    assert said["not_compared"] == ["layers.0.attention.key.bias", "layers.1.attention.key.bias"]


def test_a_proof_leaves_curves_and_no_checkpoints(fine: tuple[Heard, Path]) -> None:
    _, folder = fine
    assert {each.parent.name for each in folder.glob("*/metrics.jsonl")} == {"dp1", "dp2", "dp4.zero3", "tp2.sequence", "dp2.tp2.zero1"}
    assert not list(folder.glob("*/checkpoints"))


SPOILED = ("dp2.zero1=faster", "dp2.zero2=same_samples", "dp2.zero3=dies")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> tuple[Heard, Path]:
    """A proof in which three of four layouts go wrong, and its folder."""
    top = tmp_path_factory.mktemp("wrong")
    words = [f"layouts=dp2,{','.join(word.split('=')[0] for word in SPOILED)}", "steps=4", "optim.warmup=0"]
    serving = partial(Server, command=[sys.executable, str(SERVER), *SPOILED])
    return proved(words, top, serving, reasons=True), top / "quickstart.prove"


def test_layouts_that_go_wrong_are_named_and_leave_status_1(wrong: tuple[Heard, Path]) -> None:
    heard, folder = wrong
    assert heard.status == 1
    assert heard.lines[-1] == "3 of 4 layouts do not train the same curve: dp2.zero1, dp2.zero2, dp2.zero3"
    assert [heard.row(layout)[-1] for layout in ("dp2", "dp2.zero1", "dp2.zero2", "dp2.zero3")] == ["same", "departs", "departs", "failed"]
    said = json.loads((folder / "prove.json").read_text())
    assert [each["verdict"] for each in said["layouts"]] == ["same", "departs", "departs", "failed"]
    assert not said["ok"]


def test_replicas_that_read_the_same_samples_are_found_at_the_first_step(wrong: tuple[Heard, Path]) -> None:
    heard, folder = wrong
    assert any(re.match(r"dp2.zero2: loss departs at step 1: by \S+, where 1.0e-05 is rounding$", line) for line in heard.lines)
    assert any(line.startswith("dp2.zero2: first: step 1, micro-batch 1, embedding on rank 1 (dp 1): its output ") for line in heard.lines)
    assert not (folder / "dp1.traced").exists()
    assert (folder / "dp2.zero2" / "checkpoints").is_dir()  # to be looked at
    assert (folder / "dp1" / "checkpoints").is_dir()
    assert not (folder / "dp2" / "checkpoints").is_dir()


def test_a_learning_rate_that_is_1_percent_off_is_found(wrong: tuple[Heard, Path]) -> None:
    lines = wrong[0].lines
    assert any(re.match(r"dp2.zero1: loss departs at step [23]:", line) for line in lines)
    assert any(re.match(r"dp2.zero1: first: after step 1, \S+ on rank [01] \(dp [01]\): it differs from", line) for line in lines)


def test_a_rank_that_dies_is_named_with_its_cause(wrong: tuple[Heard, Path]) -> None:
    said = " ".join(line.strip() for line in wrong[0].lines)
    assert "dp2.zero3: rank 1 exited with 1, at step 2: ArithmeticError: what a rank may raise; its log is " in said


def test_what_departs_slightly_is_held_against_a_control() -> None:
    """Rounding grows where SGD's steps are large: one process departs from itself when it adds up in other micro-batches."""
    outcome = departing(loss=3e-5)
    done = Proved(alone=departing(loss=0.0), others=(), close=Close(loss=1e-5, norm=1e-3, weights=1e-5))
    assert slight(outcome, done)
    assert not slight(departing(loss=3e-6), done)
    assert not slight(departing(loss=3e-3), done)
    assert not slight(outcome, replace(done, control=outcome))
    assert widened(done.close, departing(loss=2e-5)) == Close(loss=2e-4, norm=1e-3, weights=1e-5)
    proof = prepared(read_asked(["layouts=dp2"])[0], Recipe("quickstart", TINY[1:], None))
    again = control(proof.alone)
    assert again is not None
    assert (again.run.train.microbatch, again.plan.microbatches, again.run.parallel) == (2, 4, proof.alone.run.parallel)
    assert again.folder != proof.alone.folder


def test_json_is_one_document_on_stdout(ranks: Ranks, tmp_path: Path) -> None:
    heard = proved(["layouts=dp2", "steps=1"], tmp_path, lambda *_: nullcontext(ranks.server), as_json=True)
    (document,) = heard.shown
    assert (heard.status, json.loads(document)["ok"]) == (0, True)


def test_a_server_that_ends_is_one_problem(tmp_path: Path) -> None:
    heard = proved(["layouts=dp2"], tmp_path, partial(Server, command=[sys.executable, "-c", "raise SystemExit(3)"]))
    assert heard.status == 1
    assert heard.told == [f"the process that starts the ranks ended with 3; its log is {tmp_path}/quickstart.prove/server.log"]


# The server


def test_ranks_that_pass_their_deadline_are_killed(ranks: Ranks, tmp_path: Path) -> None:
    proof = prepared(read_asked(["layouts=dp2", "steps=100000"])[0], Recipe("quickstart", [*TINY[1:], f"log.dir={tmp_path}"], None))
    written(proof.trials[0])
    began = time.monotonic()
    found = ranks.server.trained(proof.trials[0].folder / "run.json", 2, seconds=3.0)
    assert (found.late, found.codes) == (True, (-signal.SIGKILL, -signal.SIGKILL))
    assert time.monotonic() - began < 60


def test_a_question_that_cannot_be_answered_says_why(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.server.asked("compared", reference=str(tmp_path), layout=str(tmp_path))
    assert said == {"failed": f"{tmp_path.name} has saved nothing"}


def test_a_server_that_is_killed_is_noticed(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server:
        os.kill(server._child.pid, signal.SIGKILL)
        with pytest.raises(ServerGone, match="was killed by signal 9"):
            server.asked("compared")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_when_the_command_ends_so_does_all_that_it_started(tmp_path: Path, number: int) -> None:
    words = [*TINY, "layouts=dp2", "steps=100000", f"log.dir={tmp_path}"]
    mark = f"PROVE_TEST={tmp_path}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PROVE_TEST": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-m", "distrain", "prove", *words], env=environment, stdout=subprocess.DEVNULL)
    try:
        waited(lambda: (tmp_path / "quickstart.prove" / "dp1" / "metrics.jsonl").exists())
        assert len(marked(mark)) >= 3  # the command, the server, a rank
        process.send_signal(number)
        assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
        waited(lambda: not marked(mark))
    finally:
        end_child(process)


def waited(met: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not met():
        assert time.monotonic() < until, "the deadline passed"
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """The processes whose environment has a mark."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (each / "environ").read_bytes().split(b"\0"):
                found.append(int(each.name))
        except OSError:
            continue
    return found
