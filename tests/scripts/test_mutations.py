"""Planted errors: which are drawn, what they change, and one that a test finds."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from difflib import unified_diff
from functools import cache
from pathlib import Path

import pytest

from distrain.scripts.mutations.__main__ import mutations_in, read_arguments
from distrain.scripts.mutations.campaign import IMPORTED, ExecutedLines, MutationCampaign, TriedMutation, counts
from distrain.scripts.mutations.chosen_tests import ROOMS, named_quick_files
from distrain.scripts.mutations.copies import ROOT, Copy
from distrain.scripts.mutations.equivalents import Equivalents, read_equivalents
from distrain.scripts.mutations.mutated_files import FILE_LISTS, PLAN, TRAINING, FileList, files_to_mutate
from distrain.scripts.mutations.recorded_tests import RecordedTest, choose_recorded
from distrain.scripts.mutations.results import read_found, write_results
from distrain.scripts.mutations.sites import LEAST_OF_A_KIND, Mutation, all_mutations, draw, mutated_source
from distrain.tests.fakes.deadline import LONG_DEADLINE
from distrain.tests.fakes.processes import marked_processes


@pytest.fixture(scope="module", params=FILE_LISTS)
def files(request: pytest.FixtureRequest) -> FileList:
    return FILE_LISTS[request.param]


@cache
def mutations_of(name: str) -> list[Mutation]:
    """All mutations of a list of files."""
    return all_mutations(ROOT, FILE_LISTS[name])


@pytest.fixture(scope="module")
def mutations(files: FileList) -> list[Mutation]:
    return mutations_of(next(name for name, each in FILE_LISTS.items() if each is files))


def test_a_seed_draws_the_same_mutations_of_every_kind(files: FileList, mutations: list[Mutation]) -> None:
    kinds = tuple(files.kinds)
    drawn = draw(mutations, 1, 100, kinds)
    assert [each.name for each in drawn] == [each.name for each in draw(mutations, 1, 100, kinds)]
    assert len({each.name for each in drawn}) == 100
    assert min(Counter(each.kind for each in drawn)[kind] for kind in kinds) >= LEAST_OF_A_KIND
    assert {each.name for each in draw(mutations, 2, 100, kinds)} != {each.name for each in drawn}
    assert {each.kind for each in draw(mutations, 1, 20, kinds[-2:])} == set(kinds[-2:])


def test_every_mutation_has_a_name_of_its_own(mutations: list[Mutation]) -> None:
    assert len({each.name for each in mutations}) == len(mutations)


def test_a_mutation_changes_the_one_line_that_it_names(files: FileList, mutations: list[Mutation]) -> None:
    for mutation in draw(mutations, 3, 28, tuple(files.kinds)):
        before = ast.unparse(ast.parse((ROOT / mutation.path).read_text())).splitlines()
        changes = list(unified_diff(before, mutated_source(ROOT, mutation, files).splitlines(), n=0, lineterm=""))[3:]
        assert [line[0] for line in changes] == ["-", "+"], mutation.name
        expression = mutation.expression.removeprefix("(").removesuffix(")")  # an index that is a tuple has no brackets of its own
        assert " ".join(expression.split()) in " ".join(changes[0].split()), mutation.name


def test_every_equivalent_mutation_still_exists() -> None:
    mutations = [each for name in FILE_LISTS for each in mutations_of(name)]
    named = {(f"{each.module}:{each.function}", each.expression, each.replacement) for each in mutations}
    assert set(read_equivalents().reasons) <= named


def test_a_campaign_goes_on_from_its_file_but_for_what_survived(tmp_path: Path) -> None:
    mutation = Mutation(kind="sign", module="trainer.a", function="f", expression="-x", replacement="x", lines=(7, 8))
    rows = [TriedMutation(mutation=mutation, verdict=verdict, says="dp2", seconds=3.5) for verdict in ("prove", "survived")]
    file = tmp_path / "errors.json"
    assert read_found(file, 2) == []
    write_results(file, 2, rows)
    assert read_found(file, 2) == rows[:1]
    with pytest.raises(ValueError, match="holds seed 2, not 3"):
        read_found(file, 3)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"errors\.json is not what --json writes"):
        read_found(file, 2)
    write_results(file, 2, rows, "plan")
    assert read_found(file, 2, "plan") == rows[:1]
    with pytest.raises(ValueError, match="holds files=plan, not training"):
        read_found(file, 2)
    assert read_arguments(["seed=2", "--json", "errors.json", "--resume"]).resume
    with pytest.raises(ValueError, match="--json FILE --resume"):
        read_arguments(["--resume"])


def test_the_kinds_of_errors_are_those_of_the_files() -> None:
    assert read_arguments([]).kinds == tuple(TRAINING.kinds)
    assert read_arguments(["files=plan"]).kinds == tuple(PLAN.kinds)
    assert read_arguments(["axis", "files=plan", "term"]).kinds == ("axis", "term")
    for words in (["axis"], ["sign", "files=plan"], ["files=loop"]):
        with pytest.raises(ValueError, match=rf"{words[0]} is neither files=training\|plan\|reports, seed=N"):
            read_arguments(words)


def test_errors_are_drawn_in_files_of_the_patterns_alone(files: FileList, mutations: list[Mutation]) -> None:
    first, *_, last = sorted({each.path for each in mutations})
    found = mutations_in(mutations, [first, f"*/{last.rpartition('/')[2]}"])
    assert found == [each for each in mutations if each.path in {each.path for each in found}]
    assert {first, last} <= {each.path for each in found} < {each.path for each in mutations}
    assert mutations_in(mutations, read_arguments([]).paths) == mutations


def test_a_pattern_of_no_file_is_refused() -> None:
    assert read_arguments(["path=trainer/layers/*", "path=trainer/loop/*"]).paths == ("trainer/layers/*", "trainer/loop/*")
    with pytest.raises(ValueError, match=r"path=trainer/loop/\* names none of the files of files=plan"):
        read_arguments(["files=plan", "path=trainer/plan/*", "path=trainer/loop/*"])


def test_slow_tests_have_rooms_for_every_file(files: FileList) -> None:
    folders = {path.relative_to(ROOT).parent.as_posix() for path in files_to_mutate(ROOT, files)}
    assert not [each for each in folders if not files.tests and not f"{each}/".startswith(tuple(f"{room}/" for room in ROOMS))]


def test_the_quick_tests_named_for_a_module_may_run_it_in_a_program_that_they_start() -> None:
    assert named_quick_files(ROOT, "trainer/launch/rank/foreign_launcher.py") == ["tests/launch/test_foreign_launcher.py"]


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        ("axis", "mesh.tp > 1", ["mesh.dp > 1"]),
        ("term", "a + b * c", ["a", "b * c", "a + b", "a + c"]),
        ("term", "a and b and c", ["b and c", "a and c", "a and b"]),
        ("rounding", "a // b", ["-(-a // b)"]),
        ("rounding", "-(-a // b)", ["-(-(a // b * b) // b)"]),
        ("rounding", "ceil(a)", ["int(a)"]),
    ],
)
def test_an_error_of_a_plan_is_another_axis_a_part_left_out_or_the_other_rounding(kind: str, text: str, found: list[str]) -> None:
    """What replaces an expression computes what `found` does, of some numbers."""
    tree = ast.parse(text, mode="eval")
    nodes = [(node, [tree]) for node in ast.walk(tree.body)]
    made = [(node, each) for node, parents in nodes for each in PLAN.kinds[kind](node, parents)]
    texts = [text.replace(ast.unparse(node), ast.unparse(each), 1) for node, each in made]
    assert sorted(texts) == sorted(found)


def test_a_layout_that_runs_none_of_a_mutations_lines_is_not_proved() -> None:
    mutation = Mutation(kind="sign", module="trainer.a", function="f", expression="-x", replacement="x", lines=(7, 8))
    lines = {IMPORTED: frozenset({("trainer/a.py", 1)}), "dp1": frozenset(), "dp2": frozenset({("trainer/a.py", 8)}), "tp2": frozenset()}
    seconds = {"dp1": 1.0, "dp2": 3.0, "tp2": 2.0}
    assert ExecutedLines(seconds=seconds, lines=lines).layouts(mutation) == ["dp2"]
    one_process = {**lines, "dp1": frozenset({("trainer/a.py", 7)})}
    assert ExecutedLines(seconds=seconds, lines=one_process).layouts(mutation) == ["tp2", "dp2"]


def test_the_quickest_case_of_each_test_that_runs_a_line_comes_first() -> None:
    def case(name: str, seconds: float, *lines: int) -> RecordedTest:
        return RecordedTest(name=name, seconds=seconds, lines={"trainer/a.py": frozenset(lines)})

    tests = [case("a[1]", 3.0, 7), case("a[2]", 1.0, 8), case("b", 2.0, 6, 7), case("c", 0.1, 6, 9), case("d", 70.0, 7)]
    assert choose_recorded(tests, "trainer/a.py", (7, 8)) == ["a[2]", "b", "a[1]"]
    assert choose_recorded(tests, "trainer/a.py", (9, 9)) == ["c"]
    assert choose_recorded(tests[-1:], "trainer/a.py", (7, 7)) == ["d"]
    assert choose_recorded(tests, "trainer/b.py", (7, 7)) == []
    assert set(choose_recorded(tests, "trainer/a.py", None)) > {"a[2]", "b", "c"}  # of a statement that runs at import


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    if sys.platform != "linux":
        pytest.skip("planted errors are tried on Linux only")
    with Copy(tmp_path_factory.mktemp("copy")) as made:
        yield made


def test_a_planted_error_is_found_by_a_test_and_leaves_nothing(copy: Copy) -> None:
    mutation = next(each for each in mutations_of("training") if each.name.endswith("learning_rate: step + 1 => step - 1"))
    file = "tests/spec/test_lr_schedule.py"
    recorded = copy.ask("record_tests", seconds=LONG_DEADLINE, file=file)["tests"]
    rows = {name: {path: frozenset(numbers) for path, numbers in row["lines"].items()} for name, row in recorded.items()}
    tests = [RecordedTest(name=name, seconds=0.1, lines=lines) for name, lines in rows.items()]
    campaign = MutationCampaign(copy, ExecutedLines(seconds={}, lines={IMPORTED: frozenset()}), tests, Equivalents({}))
    tried = campaign.try_mutation(mutation)
    assert (tried.verdict, tried.says.partition("::")[0]) == ("tests", file)
    assert (copy.root / mutation.path).read_bytes() == (ROOT / mutation.path).read_bytes()
    proved = copy.ask("prove", seconds=LONG_DEADLINE, layouts=["dp2"])
    assert (proved["found"], [*proved["seconds"]]) == ("", ["dp1", "dp2"]), "what was recorded is not in the way of a proof"
    assert counts([tried], "arithmetic") == {"drawn": 1, "prove": 0, "tests": 1, "equivalent": 0, "survived": 0}


def test_an_error_in_a_plan_is_found_by_a_test_without_a_proof(copy: Copy) -> None:
    """A test that fails without the error too is left out."""
    mutation = next(each for each in mutations_of("plan") if each.path.endswith("axes/collectives.py") and each.kind == "term")
    file = "tests/plan/test_collectives.py"
    recorded = copy.ask("record_tests", seconds=LONG_DEADLINE, file=file, files="plan")["tests"]
    rows = {name: {path: frozenset(numbers) for path, numbers in row["lines"].items()} for name, row in recorded.items()}
    tests = [RecordedTest(name=name, seconds=0.1, lines=lines) for name, lines in rows.items()]
    failing = copy.root / "tests" / "plan" / "test_fails.py"
    failing.write_text("def test_fails():\n    raise AssertionError\n")
    tests.append(RecordedTest(name="tests/plan/test_fails.py::test_fails", seconds=0.0, lines=tests[0].lines))
    tried = MutationCampaign(copy, None, tests, Equivalents({}), PLAN).try_mutation(mutation)
    failing.unlink()
    assert (tried.verdict, tried.says.partition("::")[0]) == ("tests", file)
    assert (copy.root / mutation.path).read_bytes() == (ROOT / mutation.path).read_bytes()


def test_a_process_that_does_not_end_is_killed_with_all_that_it_started(copy: Copy, tmp_path: Path) -> None:
    test = tmp_path / "test_sleeps.py"
    test.write_text(
        "import os, subprocess, time\n\n\n"
        "def test_sleeps():\n"
        f"    subprocess.Popen(['sleep', '1000'], env={{**os.environ, 'SLEEPS': {str(tmp_path)!r}}})\n"
        "    time.sleep(1000)\n"
    )
    assert copy.ask("tests", seconds=4.0, names=[str(test)])["ended"] == "it takes too long"
    assert not marked_processes("SLEEPS", tmp_path)


def test_a_crash_names_its_test_however_much_it_writes(copy: Copy, tmp_path: Path) -> None:
    test = tmp_path / "test_crashes.py"
    test.write_text("import os\n\n\ndef test_crashes():\n    os.write(1, b'a line\\n' * 50)\n    os.abort()\n")
    running, *lines = copy.ask("tests", seconds=LONG_DEADLINE, names=[str(test)])["tail"]
    assert running.startswith("running: ")
    assert running.endswith("test_crashes.py::test_crashes")
    assert len(lines) == 12


def test_a_test_that_computes_without_end_is_found_without_waiting_for_the_limit_of_all(copy: Copy, tmp_path: Path) -> None:
    test = tmp_path / "test_loops.py"
    test.write_text("def test_passes():\n    pass\n\n\ndef test_loops():\n    while True:\n        pass\n")
    source = copy.root / "scripts" / "mutations" / "mutant_runs.py"
    copy.plant("scripts/mutations/mutant_runs.py", source.read_text().replace("BUSY_SECONDS = 40.0", "BUSY_SECONDS = 0.5"))
    found = copy.ask("tests", seconds=LONG_DEADLINE, names=[str(test)])
    copy.restore("scripts/mutations/mutant_runs.py")
    assert found["found"].endswith("test_loops.py::test_loops")


def test_a_disk_that_a_killed_test_has_left_mounted_is_unmounted(copy: Copy, small_disk: Path, tmp_path: Path) -> None:
    """Else no later test could empty pytest's folder, and none would run."""
    assert small_disk.exists(), "disks can be mounted here"
    folder = copy.folder / "pytest"
    test = tmp_path / "test_mounts.py"
    test.write_text(
        "import subprocess, time\n\n\n"
        "def test_mounts(tmp_path):\n"
        "    subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', str(tmp_path)], check=True)\n"
        "    time.sleep(1000)\n"
    )
    assert copy.ask("tests", seconds=5.0, names=[str(test)])["ended"] == "it takes too long"
    assert str(folder) not in Path("/proc/self/mounts").read_text()
    test.write_text("def test_passes():\n    pass\n")
    assert copy.ask("tests", seconds=LONG_DEADLINE, names=[str(test)]) == {"found": ""}
