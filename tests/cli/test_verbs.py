"""The output of ls, show and plan, on a terminal and into a pipe, and their exit statuses."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.keys import config_files
from distrain.cli.pages.text_layout import DEFAULT_WIDTH
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.plan_data import Plan
from distrain.trainer.spec.numbers.as_text import seconds_text

RECIPES = list(config_files.recipes(None))


def run_command(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command in this process; its exit status, stdout and stderr."""
    status = command(list(words))
    said = capsys.readouterr()
    return status, said.out, said.err


def run_process(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, as a user does."""
    return subprocess.run([sys.executable, "-m", "distrain", *words], capture_output=True, text=True, **more)


# ls


def test_ls_lists_every_recipe_and_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(["ls"], capsys)
    names = {line.split()[0] for line in out.splitlines() if line.startswith("  ")}
    assert (status, err) == (0, "")
    assert names == {*RECIPES, *config_files.groups(None)}
    assert max(map(len, out.splitlines())) <= DEFAULT_WIDTH


@pytest.mark.parametrize("group", [*config_files.groups(None), "recipes"])
def test_ls_of_a_group_describes_each_option(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(["ls", group], capsys)
    names = config_files.recipes(None) if group == "recipes" else config_files.options(group, None)
    assert status == 0
    options = out.partition("\n\n")[0].splitlines()  # then the keys
    assert [line.split()[0] for line in options] == list(names)
    assert all(len(line.split()) > 1 for line in options)


def test_ls_lists_the_users_own_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# a model of mine\nfamily: gpt\n")
    _, out, _ = run_command(["ls", "model", "--config-dir", str(tmp_path)], capsys)
    assert ["mine", "a", "model", "of", "mine"] in [line.split() for line in out.splitlines()]


# show


def test_show_fills_in_every_default_and_prints_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(["show", "conf=gpt3_175b", "parallel.tp=4", "cluster=6x4x64"], capsys)
    assert (status, err) == (0, "")
    assert "  kv_heads: null\n" in out
    assert "reading: 'cluster=6x4x64: data 6 x tensor 4 x pipeline 64 = 1536 GPUs" in out
    (tmp_path / "mine.yaml").write_text(out)
    assert run_command(["show", f"conf={tmp_path}/mine.yaml"], capsys)[1] == out


# plan


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_of_a_plan_begins_with_its_verdict_and_fits_its_width(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(["plan", f"conf={recipe}"], capsys)
    first, *lines = out.splitlines()
    assert first.startswith((f"{recipe} fits: ", f"{recipe} probably fits: ") if status == 0 else f"{recipe} does not fit: ")
    assert max(map(len, [first, *lines])) <= DEFAULT_WIDTH
    assert "\x1b" not in out
    heads = [line for line in lines if line[:1].isupper() and not line.startswith("This layout wastes")]
    wanted = (
        ["Mesh", "Memory of a rank", "Traffic", "Time", "Model", "In brackets"]
        if make_plan(load_recipe(recipe)).traffic
        else ["Mesh", "Memory", "Time", "Model", "In brackets"]
    )
    assert [head.startswith(word) for head, word in zip(heads, wanted, strict=True)] == [True] * len(wanted)


def test_a_plan_that_fits_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(["plan", "conf=gpt3_175b", "cluster=6x8x64", "train.batch=1536"], capsys)
    assert (status, err) == (0, "")
    reading = "cluster=6x8x64: data 6 x tensor 8 x pipeline 64 = 3072 GPUs, 384 nodes x 8, each stage on 6 nodes"
    assert reading in " ".join(out.split())


def test_a_plan_that_does_not_fit_exits_1_with_a_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(["plan", "conf=gpt3_175b", "parallel.pp=1", "parallel.dp=auto"], capsys)
    (line,) = err.splitlines()
    assert status == 1
    assert out.startswith("gpt3_175b does not fit: needs ")
    assert "\nproblem: " in out
    assert line.startswith("distrain: ")


def test_a_plan_that_cannot_be_laid_out_lists_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(["plan", "conf=gpt3_175b", "parallel.tp=7", "optim.warmup=1000000"], capsys)
    count = len(err.splitlines())
    assert status == 1
    assert out.startswith(f"gpt3_175b can't be laid out: {count} problems\n")
    assert out.count("problem: ") == count > 1


def test_without_a_stated_peak_the_page_says_how_to_get_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, out, _ = run_command(["plan", "conf=quickstart"], capsys)
    assert out.splitlines()[0].endswith("; step time not known")
    assert "Time, throughput and days are not known\n  `distrain fit` measures this machine, once; or set cluster.device.peak.fp32" in out
    assert "None" not in out
    assert "nan" not in out


# --json


def keys_of(value: Any, hint: Any) -> None:
    """Check that a JSON value has every key of its data class."""
    kind = next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), None)
    if kind is None or value is None:
        return
    named = isinstance(value, dict) and str(hint).startswith("dict[")
    for each in value if isinstance(value, list) else value.values() if named else [value]:
        assert set(each) == {row.name for row in fields(kind)}
        for key, inner in get_type_hints(kind).items():
            keys_of(each[key], inner)


# The contract of the JSON that other tools read: keys may be added, never renamed or removed.
CONTRACT: dict[str, set[str]] = {
    "": {
        "version", "name", "ok", "fits", "runnable", "reading", "problems", "warnings", "world", "mesh", "engine", "schedule",
        "microbatches", "model", "memory", "traffic", "time", "bubble_fraction", "throughput", "run",
        "step_low", "step_high", "memory_low", "memory_high",
    },
    "mesh": {"pp", "dp", "cp", "ep", "tp"},
    "model": {"parameters", "active_parameters", "flops_per_token"},
    "memory": {"peak", "capacity", "stage", "stages", "unknown"},
    "time": {"step", "compute", "exposed", "bubble", "optimizer"},
    "throughput": {
        "tokens_per_second", "tokens_per_second_per_gpu", "model_flops_per_second_per_gpu", "hardware_flops_per_second_per_gpu",
        "mfu", "hfu",
    },
    "run": {"steps", "tokens", "flops", "ideal_seconds", "seconds", "days", "checkpoint_bytes"},
}  # fmt: skip
STAGE = {"index", "layers", "parameters", "bytes"}
BYTES = {"weights", "gradients", "optimizer", "activations", "logits", "buffers", "temporary", "overhead", "total"}
MESSAGE = {"axis", "verb", "payload", "count", "sent", "link", "seconds", "exposed"}


@pytest.mark.parametrize("recipe", ["gpt3_175b", "quickstart", "mixtral_8x7b"])
def test_json_is_one_document_with_every_key_of_the_contract(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_command(["plan", f"conf={recipe}", "--json"], capsys)
    plan = json.loads(out)
    keys_of(plan, Plan)
    for section, keys in CONTRACT.items():
        part = plan[section] if section else plan
        assert part is None or keys <= set(part)
    assert all(set(stage) >= STAGE and set(stage["bytes"]) >= BYTES for stage in plan["memory"]["stages"])
    assert all(set(message) >= MESSAGE for message in plan["traffic"])


def test_json_of_a_plan_that_cannot_be_laid_out_has_problems_and_nulls(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(["plan", "conf=gpt3_175b", "parallel.tp=7", "--json"], capsys)
    plan = json.loads(out)
    assert (status, plan["ok"], plan["fits"], plan["memory"]) == (1, False, None, None)
    assert [f"distrain: {each['says']}: {each['mend']}" for each in plan["problems"]] == err.splitlines()
    assert all(set(each) >= {"rule", "says", "mend"} for each in plan["problems"])


def test_json_of_a_sweep_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(["plan", "conf=gpt3_175b", "-m", "parallel.tp=8,7", "--json"], capsys)
    first, second = json.loads(out)
    assert status == 1
    assert (first["overrides"], first["fits"]) == (["parallel.tp=8"], True)
    assert (second["overrides"], second["ok"]) == (["parallel.tp=7"], False)


# -m


def test_a_sweep_prints_a_line_for_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(["plan", "conf=gpt3_175b", "-m", "parallel.tp=8,7", "parallel.recompute=full,none"], capsys)
    head, *lines = out.splitlines()
    assert (status, err) == (1, "")
    lines, notes = lines[:4], lines[4:]
    assert notes[0] == "fastest that fits: tp=8 recompute=none"
    assert notes[1].startswith("can't: world: tp=7 recompute=full: parallel.dp=8 x tp 7 x ")
    assert notes[-1].endswith("; 1 more")
    assert head.split() == ["layout", "verdict", "memory", "step", "tokens/s", "MFU"]
    assert [line.split()[:2] for line in lines] == [[f"tp={tp}", f"recompute={how}"] for tp in (8, 7) for how in ("full", "none")]
    assert "can't: " in lines[2]


def test_a_sweep_that_fits_exits_0_and_prints_its_readings(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(["plan", "conf=gpt3_175b", "-m", "cluster=128x8,256x8", "parallel.dp=auto"], capsys)
    assert status == 0
    plans = [make_plan(load_recipe("gpt3_175b", [f"cluster={nodes}x8", "parallel.dp=auto"])) for nodes in (128, 256)]
    whole = [seconds_text(plan.run.seconds) for plan in plans if plan.run and plan.run.seconds]
    assert [line.split("  ")[-1].strip() for line in out.splitlines()[:3]] == ["whole run", *whole]
    assert out.splitlines()[-3:] == [
        "fastest that fits: cluster=256x8",
        "cluster=128x8: 128 nodes x 8 GPUs = 1024 GPUs",
        "cluster=256x8: 256 nodes x 8 GPUs = 2048 GPUs",
    ]


@pytest.mark.parametrize(
    ("engines", "says"),
    [("papers,auto", "fastest that fits: engine=auto"), ("papers", "fastest that fits: recompute=none, which no engine here runs")],
)
def test_the_fastest_of_a_sweep_is_one_that_runs_if_any_does(engines: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp8, not compiled, the papers' layout is planned to be faster than that of any engine here."""
    words = ["parallel.tp=4", "parallel.sequence=true", "train.precision=fp8", f"engine={engines}"]
    words += ["parallel.recompute=none,full"] if engines == "papers" else []
    _, out, _ = run_command(["plan", "conf=llama3_8b_1node", "-m", *words], capsys)
    assert out.splitlines()[-1] == says


def test_long_overrides_of_a_layout_have_a_line_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["parallel.overlap.pipeline", "parallel.overlap.tensor", "parallel.overlap.data", "parallel.offload.parameters"]
    _, out, _ = run_command(["plan", "conf=gpt3_175b", "-m", *(f"{key}=true,false" for key in keys)], capsys)
    assert max(map(len, out.splitlines())) <= DEFAULT_WIDTH


# Streams


@pytest.mark.parametrize("words", [["--help"], ["ls", "--help"], ["show", "-h"], ["plan", "--help"]])
def test_help_has_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(words, capsys)
    verb = words[0] if words[0] != "--help" else "plan"
    assert (status, err) == (0, "")
    assert f"  distrain {verb} " in out.split("Options:")[0]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_command(["--version"], capsys)
    assert (status, out.split()[0]) == (0, "distrain")


def test_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "distrain", "plan", "conf=quickstart"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "distrain", "ls"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "distrain: can't write to stdout: No space left on device\n")


def test_without_utf8_the_page_is_ascii() -> None:
    done = run_process("plan", "conf=gpt2_124m", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.stdout.isascii()
    assert "#" in done.stdout


def test_problems_are_printed_once_where_stdout_and_stderr_are_one_file() -> None:
    words = [sys.executable, "-m", "distrain", "plan", "conf=gpt3_175b", "parallel.tp=7"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert "problem: " in done.stdout
    assert "distrain: " not in done.stdout


def test_a_terminal_gets_colour_unless_it_asks_for_none() -> None:
    assert "\x1b[1;32m" in in_terminal({"TERM": "xterm", "NO_COLOR": ""})
    assert "\x1b" not in in_terminal({"TERM": "xterm", "NO_COLOR": "1"})
    assert "\x1b" not in in_terminal({"TERM": "dumb"})


def in_terminal(variables: dict[str, str]) -> str:
    """The output of `distrain plan` to a terminal."""
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "distrain", "plan", "conf=gpt2_124m"]
    with subprocess.Popen(words, stdout=theirs, stderr=subprocess.DEVNULL, env={**os.environ, **variables}):
        os.close(theirs)
        said = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:
                break
            if not piece:
                break
            said += piece
    os.close(ours)
    return said.decode()


def test_a_wrong_key_prints_one_line_without_a_traceback() -> None:
    done = run_process("plan", "conf=quickstart", "parallel.tpp=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "distrain: no key parallel.tpp: did you mean parallel.tp?\n"


def test_a_users_file_named_like_our_module_is_not_imported(tmp_path: Path) -> None:
    for name in ("trainer", "cli", "conf"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    done = run_process("plan", "conf=quickstart", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
