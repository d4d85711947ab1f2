"""data.stages and data.validate as users write them: on the command line, in a recipe, and wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.pages.whole_run_facts import stages_text
from distrain.trainer.launch.data_survey import DataFacts, are_local, names_files, survey_data
from distrain.trainer.launch.file_checks import FileCheck, epoch_warnings, with_files
from distrain.trainer.plan.plan import make_plan
from distrain.trainer.plan.save_interval import evaluation_seconds
from distrain.trainer.rundir.absolute_paths import with_absolute_paths
from distrain.trainer.spec.problem import Unreadable
from distrain.trainer.spec.run import DataStage, Run

TWO = "data.path=[a.txt,b.txt]"
STAGES = "data.stages=[{weights:[0.9,0.1],until:2e5},{weights:[0,1]}]"


def load(*words: str) -> Run:
    return load_recipe("quickstart", ["data=text", TWO, *words])


def test_stages_and_sets_are_read_from_the_command_line_and_from_a_recipe(tmp_path: Path) -> None:
    made = load(STAGES, "data.validate.wiki=w.txt", "data.validate.code=[c.txt,d]")
    assert made.data.stages == (DataStage(weights=(0.9, 0.1), until=2e5), DataStage(weights=(0.0, 1.0)))
    assert made.data.validate == {"wiki": "w.txt", "code": ("c.txt", "d")}
    assert load(STAGES, "data.validate={wiki: w.txt, code: [c.txt, d]}") == made
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "name: quickstart\ndefaults: [quickstart, override data: text]\ndata:\n  path: [a.txt, b.txt]\n  stages:\n"
        "    - {weights: [0.9, 0.1], until: 2e5}\n    - weights: [0, 1]\n  validate: {wiki: w.txt, code: [c.txt, d]}\n"
    )
    assert load_recipe(str(recipe)).data == made.data
    assert load_recipe(str(recipe), ["~data.validate.code", "data.validate.forum=f"]).data.validate == {"wiki": "w.txt", "forum": "f"}
    assert load_recipe(str(recipe), ["data.stages=null"]).data.stages is None


# fmt: off
WRONG = [
    (["data.validate.wiki=5"], ["data.validate.wiki=5 is not text or a list of text"]),
    (["data.validate=w.txt"], ["data.validate=w.txt is not a mapping: write data.validate.NAME=w.txt"]),
    (["data.validate={1: w.txt}"], ["data.validate: 1 is not a name: begin it with a letter"]),
    (["data.validate={a: {path: w.txt}, b: [1]}"],
        ["data.validate.a={path:w.txt} is not text or a list of text", "data.validate.b=[1] is not text or a list of text"]),
    (["data.validate.a.b=w.txt"], ["no key data.validate.a.b: did you mean data.validate?"]),
    (["data.stages=[3]"],
        ["data.stages[0]=3 is not a mapping of weights, until: set one of its keys, as data.stages[0].until=3"]),
    (["data.stages={weights:[1,2]}"], ["data.stages={weights:[1,2]} is not a list, each a mapping of weights, until"]),
    (["data.stages=[{weights:[1,2],until:5},{weight:[1,2]}]"],
        ["no key data.stages[1].weight: did you mean data.stages[1].weights?",
         "data.stages[1].weights is not set: a list, each a number, at least 0"]),
    (["data.stages=[{weights:[-1,2]}]"], ["data.stages[0].weights=[-1,2] is not a list, each a number, at least 0"]),
    (["data.stages=[{weights:[1,2],until:2T},{weights:[1,1]}]"], ["data.stages[0].until=2T is not a number: write 2e12"]),
    (["validation_file=w.txt"], ["no key validation_file: write data.validate=VALUE (a set by a name of yours: {NAME: PATH})"]),
]
# fmt: on


@pytest.mark.parametrize(("words", "says"), WRONG, ids=lambda each: " ".join(each)[:60])
def test_a_wrong_value_is_one_line_that_names_its_place(words: list[str], says: list[str]) -> None:
    with pytest.raises(Unreadable) as found:
        load(*words)
    assert [str(each) for each in found.value.problems] == says


def test_paths_of_sets_are_files_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = load("data.validate={wiki: w.txt, code: ['c*.txt', /d]}")
    assert with_absolute_paths(made).data.validate == {"wiki": f"{tmp_path}/w.txt", "code": (f"{tmp_path}/c*.txt", "/d")}
    library = load_recipe("quickstart", ["data.validate.wiki=w.txt", "launch=deepspeed"])
    assert (names_files(library), are_local(library)) == (True, False)
    (tmp_path / "w.txt").touch()
    assert are_local(library)


def test_a_plan_says_what_is_read_from_each_path_in_the_stages_that_the_run_begins() -> None:
    made = load(STAGES)  # 300 steps of 16 x 128 tokens
    plan = make_plan(made)
    assert plan.run is not None
    assert [(each.tokens, each.weights) for each in plan.run.stages] == [(200_000, (0.9, 0.1)), (414_400, (0.0, 1.0))]
    assert [each.tokens for each in plan.run.paths] == pytest.approx([180_000, 434_400])
    assert stages_text(plan) == (
        "the data change: 200 k tokens by weights 0.9 : 0.1, then 414 k tokens by weights 0 : 1; of the 2 paths it reads 180 k, 434 k"
    )
    facts = DataFacts(key=None, train_tokens=42_000, documents=None, exact=True, epochs=(2_000, 40_000), remarks=())
    known = with_files(made, plan, FileCheck(data=facts))
    assert stages_text(known).endswith("of the 2 paths it reads 180 k (90 epochs), 434 k (10.9 epochs)")
    (warning,) = epoch_warnings(made, plan, facts)
    assert warning.says.endswith("the data hold 42,000: 90 epochs of one of its sources")
    constant = make_plan(load("data.weights=[1,2]"))
    assert constant.run is not None
    assert (stages_text(constant), constant.run.stages, constant.run.paths) == ("", (), ())


@pytest.mark.parametrize(("lengths", "stated"), [((27, 40, 900), "[27,40,900]"), ((64, 64), "64")])
def test_a_plan_of_documents_of_unknown_lengths_says_those_of_the_data(lengths: tuple[int, ...], stated: str) -> None:
    words = ("data.path=a.jsonl", "data.tokenizer=bytes", "model.weights=null")
    run = load_recipe("finetune_llama", words)
    facts = DataFacts(key=None, train_tokens=None, documents=None, exact=False, epochs=(None,), remarks=(), lengths=lengths)
    plans = [with_files(run, make_plan(run), FileCheck(data=replace(facts, lengths=each))) for each in (lengths, ())]
    known, unknown = [next(each for each in plan.warnings if "one document" in each.says) for plan in plans]
    assert known.mend == f"set data.document_tokens={stated}, as these data have"
    assert unknown.mend == "set data.document_tokens to their lengths"
    assert not [
        each for each in make_plan(load_recipe("finetune_llama", [*words, *known.settings])).warnings if "one document" in each.says
    ]


def test_a_survey_tells_the_lengths_of_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "four"}\n{"text": "eleven more"}\n' * 120)
    words = ("data=text", f"data.path={tmp_path}/a.jsonl", f"data.cache={tmp_path}/cache", "data.documents=true", "data.validation=0.1")
    run = load_recipe("quickstart", words)
    assert survey_data(run, "look").lengths == ()  # a sample has few of the long documents
    assert survey_data(run, "prepare").lengths == survey_data(run, "look").lengths == (*[5] * 6, *[12] * 6)  # with the token of an end


def test_an_evaluation_takes_longer_with_sets() -> None:
    evaluated = ("train.evaluate={every: 5, batches: 6}",)
    rows = (
        ((), 1), (("data.validate={a: a, b: b}",), 3), (("data.validate={a: a, b: b}", "data.validation=0"), 2),
        (("data.validation=0",), 1),
    )  # fmt: skip
    assert [evaluation_seconds(load(*evaluated, *words), 1.5) for words, _ in rows] == [3.0 * many for _, many in rows]


def test_the_epochs_of_a_warning_are_of_the_tokens_that_it_names() -> None:
    """100 steps of 2,048 tokens are 8.9 epochs of 23,040 with padding, not 12.6 of the 16,200 without."""
    run = load_recipe("quickstart", ["data=pairs", "data.path=a.jsonl", "train.steps=100"])
    facts = DataFacts(key=None, train_tokens=16_200, documents=400, exact=True, epochs=(23_040,), remarks=())
    (warning,) = epoch_warnings(run, make_plan(run), facts)
    assert warning.says == "the run reads 205 k tokens, and an epoch has 23,040, with padding: 8.9 epochs"
