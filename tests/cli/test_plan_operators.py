"""`distrain plan --operators`: the page's table of operators is the plan's, in text, HTML and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.pages.operator_rows import operator_rows
from distrain.trainer.plan.costs.operator_kinds import OPERATOR_KINDS
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.spec.numbers.as_text import seconds_text, share_text


def test_a_mixtures_page_names_what_only_mixtures_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=mixtral_8x7b", "--operators"]) == 0
    page = capsys.readouterr().out
    table = page[page.index("\nOperators of a step") :].split("\n\n")[0].splitlines()
    plan = make_plan(load_recipe("mixtral_8x7b"))
    assert plan.time is not None
    shown = {line.split("  ")[1].strip(): line for line in table[2:]}
    for each in plan.operators:
        assert seconds_text(each.seconds) in shown[OPERATOR_KINDS[each.kind][:22].strip()], each.kind
    assert {"experts' products", "router", "token permutation"} <= set(shown)
    assert seconds_text(plan.time.compute) in shown["computing"]
    assert " again " not in table[1]  # nothing is recomputed
    assert re.search(r"ep +all_to_all", page)


def test_without_the_option_the_page_has_no_such_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=mixtral_8x7b"]) == 0
    assert "Operators of a step" not in capsys.readouterr().out


@pytest.mark.parametrize(("seq", "waits"), [(512, True), (4096, False)])
def test_a_step_that_waits_for_its_host_says_so_and_what_shortens_it(seq: int, waits: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["conf=qwen3_30b_a3b", f"train.seq={seq}"]
    wait = next(each for each in make_plan(load_recipe("qwen3_30b_a3b", words[1:])).operators if each.kind == "host")
    for verb, heading in (("plan", "Time of a step"), ("simulate", "What if")):
        assert command([verb, *words]) in (0, 1)
        section = " ".join(capsys.readouterr().out.partition(heading)[2].partition("\n\n")[0].split())
        assert ("larger train.microbatch or train.seq" in section) == waits
        assert (f"{seconds_text(wait.seconds)} ({share_text(wait.share)}) of launching operators" in section) == (waits and verb == "plan")


def test_what_is_recomputed_has_a_column_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "conf=llama3_8b_1node", "parallel.recompute=full", "--operators"]) == 0
    out = capsys.readouterr().out
    assert "again" in next(line for line in out.splitlines() if line.startswith("  operator "))
    assert "again: computed again in backward" in out


def test_the_rows_end_with_what_else_a_step_takes() -> None:
    plan = make_plan(load_recipe("megatron_1t_6x8x64"))
    rows = operator_rows(plan)
    others = ["computing", "waiting for messages", "waiting in the pipeline", "optimizer step", "the host, once a step"]
    assert [row[0] for row in rows[-5:]] == others
    assert len({len(row) for row in rows}) == 1


def test_json_and_html_have_them_without_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert command(["plan", "conf=llama3_8b_1node", "--json", "--html", str(page)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert sum(each["seconds"] for each in plan["operators"]) == pytest.approx(plan["time"]["compute"])
    html = page.read_text()
    for each in plan["operators"]:
        assert OPERATOR_KINDS[each["kind"]].replace("'", "&#x27;") in html or OPERATOR_KINDS[each["kind"]] in html


@pytest.mark.parametrize("words", ["conf=llama3_8b_1node parallel.tp=3", "conf=llama3_8b_1node device.peak={}"])
def test_a_plan_without_times_has_no_table(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    command(["plan", *words.split(), "--operators"])
    assert "Operators of a step" not in capsys.readouterr().out


def test_a_sweep_takes_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "-m", "conf=llama3_8b_1node", "parallel.tp=1,2", "--operators"]) == 2
    assert capsys.readouterr().err == "distrain: --operators is of one plan, -m of several: leave one of them out, or add --json\n"
    assert command(["plan", "-m", "conf=llama3_8b_1node", "parallel.tp=1,2", "--operators", "--json"]) == 0
    assert all(each["operators"] for each in json.loads(capsys.readouterr().out))
