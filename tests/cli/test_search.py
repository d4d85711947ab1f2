"""`distrain search`: its page, its JSON, the recipe that it writes, sizes of the cluster, and what a careless user types."""

import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest

from distrain.cli.app import command
from distrain.cli.config.load import load_recipe
from distrain.cli.pages.search_page import best_hint, search_text, sizes_text
from distrain.cli.pages.text_layout import Style
from distrain.cli.verbs import plan as plan_verb
from distrain.cli.verbs.search_scope import fixed_keys, node_counts
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.search.cluster_sizes import SizedAnswer
from distrain.trainer.plan.search.search_result import find_layouts
from distrain.trainer.spec.numbers.as_text import seconds_text
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import Run

SMALL = "conf=gpt2_124m cluster=1x4 train.batch=16"
LARGE = "conf=llama3_70b cluster=8x8"


def call(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run `distrain search`; return (exit status, stdout, stderr)."""
    status = command(["search", *shlex.split(arguments)])
    return status, *capsys.readouterr()


_printed: dict[str, str] = {}  # what searches of several tests printed, by their arguments


def printed(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The output of a search that succeeds, made once."""
    if arguments not in _printed:
        status, out, err = call(arguments, capsys)
        assert (status, err) == (0, "")
        _printed[arguments] = out
    return _printed[arguments]


def answer(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(f"{SMALL} {arguments} --json", capsys))
    return found


def test_the_words_of_every_row_plan_what_the_row_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer("", capsys)
    conf, *given = SMALL.split()
    rows = found["rows"] + found["front"]
    assert len(found["rows"]) >= 3
    for row in rows:
        plan = make_plan(load_recipe(conf.removeprefix("conf="), [*given, *row["overrides"]]))
        assert plan.ok
        assert plan.runnable
        assert plan.memory
        assert plan.time
        assert plan.throughput
        assert (plan.engine, plan.memory.peak, plan.time.step) == (row["engine"], row["memory"], row["step"])
        assert plan.throughput.tokens_per_second == pytest.approx(row["tokens_per_second"], rel=1e-12)
        assert plan.throughput.mfu == pytest.approx(row["mfu"], rel=1e-12)
        assert plan.run
        assert plan.run.days == pytest.approx(row["days"], rel=1e-12)
    steps = [row["step"] for row in found["rows"]]
    assert steps == sorted(steps)
    assert found["legal"] == found["costed"] + found["discarded"]


def test_a_runner_up_is_told_which_term_slows_it(capsys: pytest.CaptureFixture[str]) -> None:
    best, *others = answer("", capsys)["rows"]
    assert set(best["slower_by"].values()) == {0.0}
    for row in others:
        assert sum(row["slower_by"].values()) == pytest.approx(row["step"] - best["step"], abs=1e-12)


def test_the_page_begins_with_the_best_layout_and_the_words_that_plan_it(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(SMALL, capsys)
    verdict, words, *_ = out.split("\n\n")
    assert verdict.startswith("gpt2_124m on 1 node x 4 A100-40G: best is ")
    assert f"plan {SMALL}" in " ".join(words.split())
    assert "discarded by bounds" in out
    assert max(map(len, out.splitlines())) <= 80


def test_degrees_of_the_command_line_stay(capsys: pytest.CaptureFixture[str]) -> None:
    for row in answer("parallel.tp=2 train.microbatch=2 engine=native", capsys)["rows"]:
        assert (row["mesh"]["tp"], row["microbatch"], row["engine"]) == (2, 2, "native")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["parallel.tp=8"], ["parallel.tp"]),
        (["cluster=4x8"], []),
        (["cluster=2x2x2"], ["parallel.dp", "parallel.pp", "parallel.tp"]),
        (["parallel={zero: 1, tp: 2}"], ["parallel.tp", "parallel.zero"]),
        (["parallel=zero2"], ["parallel.zero"]),
        (["train.batch=8", "train.microbatch=2", "engine=zero"], ["engine", "train.microbatch"]),
    ],
    ids=str,
)
def test_the_keys_that_a_command_line_fixes(words: list[str], keys: list[str]) -> None:
    assert sorted(fixed_keys(words, None)) == keys


HEAVY_HEAD = "parallel.pp=4 parallel.schedule=1f1b model.vocab=40000"


def test_boundaries_are_faster_than_even_stages_and_plan_as_the_row_says(capsys: pytest.CaptureFixture[str]) -> None:
    even, best = (answer(f"{HEAVY_HEAD} search.boundaries={each}", capsys)["rows"][0] for each in ("false", "true"))
    found = best["boundaries"]
    assert even["boundaries"] is None
    assert best["step"] < 0.95 * even["step"]
    assert sum(found["stages"]) == 12
    assert found["least_step"] <= best["step"] < found["even_step"]
    plans = [
        make_plan(load_recipe("gpt2_124m", [*f"cluster=1x4 train.batch=16 {HEAVY_HEAD}".split(), *best["overrides"], *stages]))
        for stages in ([], [f"parallel.stages={_even(found['stages'])}"])
    ]
    for plan, step in zip(plans, (best["step"], found["even_step"]), strict=True):
        assert plan.time
        assert plan.time.step == step


def _even(stages: list[int]) -> str:
    return str([12 // len(stages)] * len(stages)).replace(" ", "")


def test_the_page_says_what_boundaries_win(capsys: pytest.CaptureFixture[str]) -> None:
    best = answer(f"{HEAVY_HEAD} search.boundaries=true", capsys)["rows"][0]
    status, out, _ = call(f"{SMALL} {HEAVY_HEAD} search.boundaries=true", capsys)
    won = 100 * (1 - best["step"] / best["boundaries"]["even_step"])
    assert status == 0
    assert f"({won:.1f} % less time than even ones" in " ".join(out.split("\n\n")[0].split())


def test_boundaries_of_the_smallest_layouts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(f"{SMALL} search.boundaries=true search.by=memory", capsys)
    assert status == 1
    assert "search.by=memory the smallest layouts: leave one of them out" in " ".join(out.split())


def test_layers_of_the_command_line_stay_with_boundaries(capsys: pytest.CaptureFixture[str]) -> None:
    words = "parallel.pp=4 parallel.stages=[4,4,2,2] parallel.schedule=1f1b search.boundaries=true"
    for row in answer(words, capsys)["rows"]:
        assert row["boundaries"] is None
        assert "parallel.stages" not in " ".join(row["overrides"])


def test_all_has_a_row_for_each_mesh_and_rows_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    every, three = answer("--all", capsys)["rows"], answer("search.rows=3", capsys)["rows"]
    assert three == every[:3]
    assert len(every) > 3


def test_by_memory_the_smallest_layout_is_first(capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer("search.by=memory", capsys)["rows"]
    assert [row["memory"] for row in rows] == sorted(row["memory"] for row in rows)
    assert rows[0]["memory"] < answer("", capsys)["rows"][0]["memory"]


def test_without_step_times_the_page_says_that_memory_alone_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(f"{SMALL} cluster.device.bandwidth=null", capsys)
    assert (status, " ".join(out.split()).count("no step time is known: layouts are compared by memory alone")) == (0, 1)


def test_headroom_leaves_memory_free(capsys: pytest.CaptureFixture[str]) -> None:
    smallest = answer("search.by=memory", capsys)["rows"][0]["memory"]
    rows = answer(f"cluster.device.memory={round(smallest / 0.9)} search.headroom=0.05", capsys)["rows"]
    assert rows
    assert all(row["memory"] <= 0.95 * smallest / 0.9 for row in rows)


def test_nothing_fits_is_one_line_with_a_mend(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call("conf=llama3_405b cluster=1x8", capsys)
    assert status == 1
    assert "layouts fits into 95 % of the memory of 1 x 8 H100-80G: search more nodes: search.nodes=2..16" in " ".join(out.split())


def test_keys_that_no_layout_has_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(f"{SMALL} parallel.tp=3", capsys)
    assert status == 1
    assert "tp 3 x cp 1 x pp 1 = 3 does not divide: the cluster has 1 x 4 = 4 devices: set parallel.tp=2" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("engine=papers", ""),
        ("engine=pipe parallel.offload.optimizer=true", ": engine pipe does not run parallel.offload.optimizer=true"),
        ("engine=pipe parallel.zero=2", ": engine pipe does not run parallel.zero=2"),
        ("search.runnable=false parallel.zero=3 parallel.offload.optimizer=false parallel.offload.parameters=true", ""),
    ],
)
def test_no_legal_layout_is_one_line_with_a_mend(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The micro-batch of the recipe, which a search chooses, does not divide this batch: that is no reason."""
    status, out, err = call(f"{SMALL} {words}", capsys)
    assert (status, err) == (1, "")
    says, mend = "there is no legal layout", "leave some of the given keys free"
    if "runnable" not in words:
        says, mend = f"{says} that an engine here runs{why}", f"{mend}, or set search.runnable=false"
    assert " ".join(out.split()) == f"gpt2_124m on 1 node x 4 A100-40G: {says}: {mend}"


def plan_output(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run `distrain plan`; return (exit status, stdout)."""
    return command(["plan", *shlex.split(arguments)]), capsys.readouterr().out


def test_a_plan_that_wastes_time_ends_with_the_best_layout_as_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = plan_output(LARGE, capsys)
    *_, words = out.split("\n\n")
    text = " ".join(words.split())
    step, best = (json.loads(each) for each in (plan_output(f"{LARGE} --json", capsys)[1], printed(f"{LARGE} --json", capsys)))
    assert status == 0
    assert (
        f"This layout wastes {100 * (1 - best['rows'][0]['step'] / step['time']['step']):.1f} % of its time: pp 4 x dp 4 x cp 2 x tp 2"
        in text
    )
    assert " search conf=llama3_70b cluster=8x8 " in text
    best_words = shlex.split(text.partition(" plan ")[2])
    plan = make_plan(load_recipe("llama3_70b", best_words[1:]))
    assert plan.time
    assert plan.time.step == best["rows"][0]["step"]
    assert "wastes" not in plan_output(shlex.join(best_words), capsys)[1]


@pytest.mark.parametrize(("margin", "tells"), [(0.01, True), (-0.01, False)])
def test_a_plan_tells_waste_that_is_worth_it(
    margin: float, tells: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["parallel.pp=4", "parallel.dp=2", "parallel.zero=1"]
    run = load_recipe("llama3_8b_1node", [*words, "parallel.recompute=full"])
    plan = make_plan(run)
    assert command(["search", "conf=llama3_8b_1node", *words, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["rows"][0]["step"]
    assert plan.time
    monkeypatch.setattr(plan_verb, "WORTH_TELLING", 1 - best / plan.time.step - margin)
    request = plan_verb.PlanRequest(conf="llama3_8b_1node", overrides=tuple(words), config_dir=None, as_json=False, html=None)
    assert bool(plan_verb._waste(run, plan, request)) == tells


@pytest.mark.parametrize(
    "words", ["conf=quickstart parallel.recompute=full", "conf=llama3_70b parallel.recompute=full", "conf=llama3_8b_1node"]
)
def test_a_plan_on_cpus_on_many_devices_or_without_waste_is_left_alone(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = plan_output(words, capsys)
    assert status == 0
    assert "wastes" not in out


def test_sizes_give_days_and_cost_against_devices(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call("conf=llama3_2_1b_1node cluster.price=2 search.nodes=1..4 search.by=cost", capsys)
    assert (status, err) == (0, "")
    assert out.startswith("llama3_2_1b_1node: best by cost on 1 node; up to ")
    assert max(map(len, out.splitlines())) <= 80
    rows = [line.split() for line in out.splitlines()[3:]]
    assert [row[0] for row in rows if row[0].isdecimal()] == ["8", "16", "32"]


@pytest.mark.parametrize(
    ("text", "counts"),
    [("3", [3]), ("2..9", [2, 4, 8]), ("64..100+16", [64, 80, 96]), (" 4 .. 5 + 1 ", [4, 5]), ("1..99999+1", list(range(1, 17)))],
)
def test_sizes_double_or_add(text: str, counts: list[int]) -> None:
    assert node_counts(text) == counts


@pytest.mark.parametrize("text", ["", "0..4", "8..4", "4..8+0", "4..8+", "+2", "4..8..16", "four"])
def test_what_is_no_range_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(Unreadable, match=r"write it as 8\.\.512, which doubles, or as 64\.\.128\+16, which adds"):
        node_counts(text)


def sizes(words: str, capsys: pytest.CaptureFixture[str]) -> dict[int, float]:
    """The days of a run by nodes, of a search over sizes."""
    found = json.loads(call(f"conf=llama3_2_1b_1node train.tokens=1e12 {words} --json", capsys)[1])
    return {each["nodes"]: each["rows"][0]["days"] for each in found}


def test_the_smallest_cluster_that_trains_in_so_many_days(capsys: pytest.CaptureFixture[str]) -> None:
    words = "conf=llama3_2_1b_1node train.tokens=1e12 search.within=6"
    status, out, err = call(words, capsys)
    assert (status, err) == (0, "")
    verdict = " ".join(out.partition("\n\n")[0].split())
    assert re.fullmatch(
        r"llama3_2_1b_1node: 6 nodes \(48 GPUs\) train it in 5\.\d+ days \(\S+ to \S+\), the fewest .* at most 6\.00 days "
        r"Here 5 nodes take longer than 4 nodes, so a smaller size .* may be fast enough: search\.nodes=1\.\.5\+1 tries the nearest",
        verdict,
    )
    every = sizes("search.nodes=1..6+1", capsys)
    assert min(nodes for nodes, days in every.items() if days <= 6) == 6
    rows = re.findall(r"^ +(\d+) .* ([\d.]+) +[a-z]+ \d.*$", out, re.MULTILINE)
    assert [int(gpus) // 8 for gpus, _ in rows] == [1, 2, 4, 5, 6, 8]
    assert [days for _, days in rows[:-1]] == [f"{every[int(gpus) // 8]:.1f}" for gpus, _ in rows[:-1]]


def test_sizes_far_apart_are_searched_until_no_size_is_between(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the 30 sizes between 1 and 32 the first ones are 4, 7 and 10: an eighth of the gap apart."""
    tried = sizes("search.within=3.2 search.nodes=1..32+31", capsys)
    found = min(nodes for nodes, days in tried.items() if days <= 3.2)
    assert {1, 4, 7, 10, 32} < set(tried)
    assert found - 1 in tried
    assert len(tried) < 20


def test_a_recipe_that_is_wrong_on_every_size_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("search.within=3 search.nodes=1..2", "search.nodes=1..2"):
        status, out, _ = call(f"conf=llama3_2_1b_1node train.steps=10 optim.warmup=20 {words}", capsys)
        assert status == 1
        assert out.startswith("llama3_2_1b_1node: optim.warmup=20 is not shorter than train.steps=10")


def test_a_search_within_days_says_where_fewer_nodes_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sizes of which more nodes take longer; none of those that each take less than the one before."""

    runs = {nodes: load_recipe("llama3_2_1b_1node", [f"cluster.nodes={nodes}", "search.rows=1"]) for nodes in (1, 2, 3, 5)}
    searched = {nodes: find_layouts(run) for nodes, run in runs.items()}

    def sized(nodes: int, days: float) -> SizedAnswer:
        found = searched[nodes]
        return SizedAnswer(nodes, runs[nodes], replace(found, rows=(replace(found.rows[0], days=days),)))

    goal = load_recipe("llama3_2_1b_1node", ["search.within=3.0"]).search
    page = sizes_text([sized(1, 9.0), sized(2, 5.0), sized(3, 6.0), sized(5, 2.5)], goal, Style())
    assert (
        "Here 3 nodes take longer than 2 nodes, so a smaller size that was not tried may be fast enough: "
        "search.nodes=1..4+1 tries the nearest"
    ) in " ".join(page.split())
    for days in ((9.0, 5.0, 4.0, 2.5), (9.0, 5.0, 2.9, 2.5)):
        page = sizes_text([sized(nodes, each) for nodes, each in zip((1, 2, 3, 5), days, strict=True)], goal, Style())
        assert "take longer" not in page


def test_a_front_of_a_batch_that_grows_has_the_days_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = "conf=llama3_8b_1node train.batch=64 train.rampup.batch=16 train.rampup.by=16 train.rampup.until=1e9 train.tokens=4e9"
    assert command(["search", *words.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert command(["search", *words.split()]) == 0
    page = capsys.readouterr().out
    front = page[page.index("Less memory, more time") :].splitlines()[1:]
    first = answer["front"][0]
    assert first["slower_by"] == {}
    assert f"{seconds_text(86400 * first['days'])} the run: " in front[0]
    assert seconds_text(first["step"]) not in front[0]
    safe = next((line for line in page.split("\n\n") if line.startswith("The fastest whose whole error bar")), "the run")
    assert "the run" in safe


def test_headroom_finds_what_fits_for_certain(capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest whose whole error bar fits is the best that leaves its width free."""
    assert max(map(len, printed(LARGE, capsys).splitlines())) <= 80
    page = " ".join(printed(LARGE, capsys).split())
    answer = json.loads(printed(f"{LARGE} search.headroom=0.32 --json", capsys))
    best = answer["rows"][0]
    assert best["memory_high"] <= answer["capacity"]
    says = page[page.index("The fastest whose whole error bar fits: ") :].partition(" The best layout")[0]
    assert says.endswith(f"{seconds_text(best['step'])} a step")
    assert all(f"{name} {degree}" in says for name, degree in best["mesh"].items() if degree > 1)


def test_where_no_layout_surely_fits_the_page_says_how_to_search_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{LARGE} search.rows=1"
    run = load_recipe("llama3_70b", words.split()[1:])
    found = find_layouts(run)
    answer = replace(found, front=found.front[:1])
    assert len(found.front) > 1
    page = " ".join(search_text(answer, words.split(), run.search.by, Style()).split())
    hint = re.search(r"fits as a whole: search.headroom=(0.\d\d) searches", page)
    assert hint
    share = 1 - answer.rows[0].memory / (answer.rows[0].memory_high or 0)
    assert share <= float(hint[1]) < share + 0.011


def test_a_page_shows_eight_of_a_long_front_with_both_ends_and_a_hint_counts_all_layouts() -> None:
    words = ["conf=gpt2_124m", "cluster=1x4"]
    run = load_recipe("gpt2_124m", words[1:])
    found = find_layouts(run)
    front = [replace(found.rows[0], memory=(30 - at) * 2**30, step=1.0 + at) for at in range(20)]
    answer = replace(found, front=tuple(front), legal=1_234_567)
    page = search_text(answer, words, run.search.by, Style())
    heading = page.index("Less memory, more time\n")
    shown = [line for line in page[heading:].splitlines() if re.match(r"  \d\d\.\d GiB, ", line)]
    assert len(shown) == 8
    assert (shown[0].split(":")[0].strip(), shown[-1].split(":")[0].strip()) == ("30.0 GiB, 1.00 s", "11.0 GiB, 20.0 s")
    assert "8 of 20 such layouts" in page
    assert best_hint(answer, words).says.startswith("The best of 1,234,567 layouts is ")


def test_no_size_may_train_within_so_many_days(capsys: pytest.CaptureFixture[str]) -> None:
    words = "conf=llama3_2_1b_1node train.tokens=1e12 search.nodes=1..2 search.within=3"
    status, out, err = call(words, capsys)
    assert (status, err) == (1, "")
    assert out.startswith("llama3_2_1b_1node: no size up to 2 nodes trains it in 3.00 days\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "search.within=3 search.by=memory",
            "search.within is of the fastest layouts, and search.by=memory ranks by memory: leave one of them out",
        ),
        ("search.within=3 -o best", "-o writes one layout: search one size: leave search.within out"),
        ("search.within=0", "search.within=0 is not a number, above 0"),
        ("search.within=soon", "search.within=soon is not a number"),
    ],
)
def test_days_that_cant_be_searched_for_get_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(f"{SMALL} {words}", capsys)
    assert (status, out) == (2, "")
    assert err.startswith(f"distrain: {says}")
    assert err.count("\n") == 1


def test_the_fastest_layout_that_fits_with_its_whole_error_bar_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(f"{LARGE} --json", capsys))
    out = " ".join(printed(LARGE, capsys).split())
    safe = next(row for row in found["front"] if row["memory_high"] <= found["capacity"])
    assert found["rows"][0]["memory_high"] > found["capacity"]
    assert "engine native; probably fits: " in out
    assert f"The fastest whose whole error bar fits: pp {safe['mesh']['pp']} x dp {safe['mesh']['dp']} x cp 2 x tp 4, " in out
    assert "error bar" not in " ".join(call(f"{LARGE} search.rows=1 search.headroom=0.4", capsys)[1].split())


@pytest.mark.parametrize("by", ["cost", "tokens_per_dollar"])
@pytest.mark.parametrize("sizes", ["", "search.nodes=1..2"])
def test_a_search_by_cost_says_that_there_is_no_price(by: str, sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    says = "cluster.price (of a GPU-hour) is not set: no cost is known; the order is the same at any price"
    words = f"{SMALL} {sizes} search.by={by}"
    assert says in " ".join(call(words, capsys)[1].split())
    assert "cluster.price (" not in call(f"{words} cluster.price=2", capsys)[1]
    assert "cluster.price (" not in printed(f"{SMALL} {sizes}", capsys)


@pytest.mark.parametrize("by", ["cost", "tokens_per_dollar"])
def test_a_price_does_not_change_which_size_is_best(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"conf=llama3_2_1b_1node search.nodes=1..4 search.by={by}"
    verdicts = [call(f"{words} {price}", capsys)[1].split(";")[0] for price in ("", "cluster.price=2")]
    assert verdicts[0] == verdicts[1] == f"llama3_2_1b_1node: best by {by.replace('_', ' ')} on 1 node"


@pytest.mark.parametrize("by", ["time", "cost", "days"])
def test_no_size_is_best_where_no_time_is_known(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"search.nodes=1..2 parallel.offload.optimizer=true cluster.host.link=null search.by={by} cluster.price=2"
    status, out, _ = call(f"{SMALL} {words}", capsys)
    assert status == 0
    assert " ".join(out.split()).startswith(
        f"gpt2_124m: no step time is known, so no size is best by {by}: search.by=memory needs none GPUs"
    )


def test_the_cost_of_a_run_is_its_hours_times_the_price() -> None:
    run: Run = load_recipe("llama3_8b_1node", ["cluster.price=2.5"])
    whole = make_plan(run).run
    assert whole is not None
    assert whole.seconds is not None
    assert whole.cost == pytest.approx(whole.seconds / 3600 * 8 * 2.5, rel=1e-12)


@pytest.mark.parametrize(("text", "counts"), [("8..64", [8, 16, 32, 64]), ("3..7", [3, 6]), ("5", [5])])
def test_sizes_double(text: str, counts: list[int]) -> None:
    assert node_counts(text) == counts


@pytest.mark.parametrize("text", ["8..4", "0..4", "many", "1,2", ""])
def test_a_careless_range_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(Unreadable, match=r"is not a range of nodes: write it as 8\.\.512"):
        node_counts(text)
