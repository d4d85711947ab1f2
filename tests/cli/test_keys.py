"""Descriptions of config keys: one row per key in spec/keys/meanings.py, shown by `ls KEY` and by `show --comments`."""

import json
import shlex
from dataclasses import is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Meta

from distrain.cli.app import command
from distrain.cli.config.composition import config_yaml
from distrain.cli.config.load import compose_config, load_recipe
from distrain.cli.keys import config_files
from distrain.cli.keys.key_help import REQUIRED, family_defaults, key_comments, key_fields, key_help, sections, type_summary
from distrain.cli.keys.key_search import keys_about
from distrain.cli.keys.keys import WRITTEN_KEYS, config_keys
from distrain.cli.pages.text_layout import DEFAULT_WIDTH
from distrain.cli.recipe_files import yaml_edit
from distrain.trainer.spec.keys.meanings import KEYS, Unit
from distrain.trainer.spec.read import read_run
from distrain.trainer.spec.run import Run

# Recipes that set other keys than most: comments belong to keys, whatever the recipe.
COMMENTED = ("quickstart", "bert_large", "finetune_llama", "llama3_8b_finetune", "megatron_1t_6x8x64", "mixtral_8x7b", "nano_shakespeare")
LEAVES = [key for key in config_keys() if key not in WRITTEN_KEYS]


def call(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command line; return (exit status, stdout, stderr)."""
    status = command(shlex.split(arguments))
    return status, *capsys.readouterr()


def nullable(of: type = Run, at: str = "") -> dict[str, bool]:
    """Return every key and section, and whether it may be null."""
    rows = {}
    for name, hint in get_type_hints(of, include_extras=True).items():
        rows[f"{at}{name}"] = type(None) in get_args(hint)
        for kind in (hint, *get_args(hint)):
            if is_dataclass(kind) and isinstance(kind, type):
                rows |= nullable(kind, f"{at}{name}.")
    return rows


# The table


def test_every_key_has_a_row_and_every_row_a_key_in_the_same_order() -> None:
    assert list(KEYS) == [key for key, _, _ in key_fields()]


def test_a_mapping_with_fixed_keys_has_a_row_for_each() -> None:
    assert {f"cluster.device.peak.{name}" for name in ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")} <= KEYS.keys()


def test_the_keys_that_may_be_null_have_a_meaning_of_null() -> None:
    rows = {key: may for key, may in nullable().items() if key in KEYS}
    assert {key for key, row in KEYS.items() if row.null} == {key for key, may in rows.items() if may}


def test_a_row_has_a_short_sentence_and_a_known_unit() -> None:
    for key, row in KEYS.items():
        assert 5 < len(row.says) <= 90, key
        assert row.says == row.says.strip().rstrip("."), key
        assert row.unit in get_args(Unit), key
        assert row.says.isprintable(), key
        assert row.null.isprintable(), key


def test_a_quantity_has_a_unit() -> None:
    quantities = [key for key in LEAVES if key.endswith((".bandwidth", ".latency", ".memory", ".seq", ".batch", ".warmup"))]
    assert quantities
    assert [key for key in quantities if not KEYS[key].unit] == []


def test_the_shown_default_is_a_value_that_its_key_takes() -> None:
    rows = {key: key_help(key)[0] for key in LEAVES if not family_defaults(key)}
    shown = [f"{key}={row.default}" for key, row in rows.items() if row.default not in (REQUIRED, "null", "none")]
    assert len(shown) > 50
    read_run(compose_config("llama3_8b", shown))


def test_defaults_that_depend_on_the_family_are_shown_by_family() -> None:
    assert family_defaults("model.norm") == (
        "by family: bert layernorm, gpt layernorm, hybrid rmsnorm1p, llama rmsnorm, mla rmsnorm, moe rmsnorm"
    )
    assert family_defaults("model.layers") == family_defaults("optim.name") == family_defaults("norm") == ""


def test_a_key_takes_every_choice_that_is_shown() -> None:
    """The first choices of all keys in one run, then the second ones, and so on."""
    choices = [[f"{key}={choice}" for choice in key_help(key)[0].choices] for key in LEAVES]
    runs = [[word for word in row if word] for row in zip_longest(*choices)]
    assert len(runs) > 5
    for words in runs:
        read_run(compose_config("llama3_8b", words))


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"ge": 0, "le": 1}, "a number, at least 0, at most 1"),
        ({"ge": 1e-30, "le": 1e30}, "a number, above 0"),
        ({"gt": 0, "le": 1e6}, "a number, above 0, at most 1e+06"),
    ],
)
def test_a_bound_that_only_keeps_numbers_finite_is_not_shown(bounds: dict[str, Any], text: str) -> None:
    assert type_summary(Annotated[float, Meta(**bounds)]) == text


# ls KEY


def test_ls_of_a_key_describes_it(capsys: pytest.CaptureFixture[str]) -> None:
    for key in LEAVES:
        status, out, err = call(f"ls {key}", capsys)
        assert (status, err) == (0, ""), key
        assert out.startswith(f"{key}  ")
        assert " ".join(KEYS[key].says.split()) in " ".join(out.split())
        assert (f"({KEYS[key].unit})" in out) == bool(KEYS[key].unit), key
        assert max(map(len, out.splitlines())) <= DEFAULT_WIDTH


@pytest.mark.parametrize("section", sorted(sections()))
def test_ls_of_a_section_lists_every_key_in_it(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(f"ls {section}", capsys)
    listed = [line.split()[0] for line in out.splitlines() if line.startswith(f"{section}.")]
    assert listed == [key for key in KEYS if key.startswith(f"{section}.") and key not in WRITTEN_KEYS]


def test_ls_of_a_group_lists_its_options_and_then_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    options, keys = call("ls device", capsys)[1].split("\n\nKeys of device\n")
    assert [line.split()[0] for line in options.splitlines()] == list(config_files.options("device", None))
    assert keys.startswith("cluster.device.name  text; required\n")


@pytest.mark.parametrize("choice", [f"{group}={next(iter(config_files.options(group, None)))}" for group in config_files.groups(None)])
def test_ls_of_an_option_prints_its_file(choice: str, capsys: pytest.CaptureFixture[str]) -> None:
    group, _, name = choice.partition("=")
    text = config_files.options(group, None)[name].read_text()
    assert call(f"ls {choice}", capsys) == (0, text, "")
    assert json.loads(call(f"ls {choice} --json", capsys)[1])["text"] + "\n" == text


def test_ls_of_an_option_of_ones_own_prints_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("family: \x1b[31mgpt\n")
    assert call(f"ls model=mine --config-dir {tmp_path}", capsys) == (0, "family: \\x1b[31mgpt\n", "")
    assert call("ls conf=quickstart", capsys)[1] == config_files.recipes(None)["quickstart"].read_text()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("modle", "no group modle: did you mean model?"),
        ("run", "no group run: did you mean runs?"),
        ("parallel.tpp", "no key parallel.tpp: did you mean parallel.tp?"),
        ("train.evaluate.evry", "no key train.evaluate.evry: did you mean train.evaluate.every?"),
        ("cluster.device.peak.bf61", "no key cluster.device.peak.bf61: did you mean bf16?"),
    ],
)
def test_a_misspelt_name_gets_the_closest_one(name: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(f"ls {name}", capsys)
    assert (status, out, err) == (2, "", f"distrain: {line}\n")


def test_an_unknown_name_gets_the_list_of_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = call("ls zzz", capsys)
    assert err.startswith("distrain: no group or key zzz: known: checkpoint, ")
    assert err.endswith(", recipes, runs, and the keys in them\n")


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("nvlink", ["cluster=dgx_h100", "cluster.inside"]),
        ("huggingface", ["model.hf", "model.weights"]),
        ("learning rate", ["optim.lr", "optim.min_lr"]),
        ("COST", ["cluster.price", "search.by"]),
        ("tp", ["parallel.tp", "parallel.sequence"]),
        ("loss", ["model.router.z_loss", "train.loss_chunks"]),
        ("h100", ["conf=llama3_70b", "cluster=dgx_h100", "device=h100_80g"]),
        ("offload", ["parallel=offload", "parallel.offload.optimizer"]),
        ("tokens", ["data=tokens", "train.tokens"]),
        ("moe", ["model=tiny_moe", "model.family"]),
    ],
)
def test_a_word_finds_the_options_and_keys_that_are_about_it(word: str, named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(f"ls {shlex.quote(word)}", capsys)
    assert status == 0
    assert [name for name in named if f"\n{name} " not in f"\n{out}"] == []
    assert "\ntrain.seed " not in f"\n{out}"


def test_a_word_is_found_at_its_begin_alone() -> None:
    assert [row.key for row in keys_about("InfiniB")] == ["cluster.between"]
    assert keys_about("nfiniband") == keys_about("a") == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gradient_checkpointing", "no key gradient_checkpointing: write parallel.recompute=VALUE (none, selective or full)"),
        ("epochs", "no key epochs: train.steps or train.tokens sets the length of a run"),
    ],
)
def test_another_trainers_word_gets_our_key(name: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(f"ls {name}", capsys) == (2, "", f"distrain: {line}\n")


@pytest.mark.parametrize(
    ("name", "lines"),
    [("quickstart", ["conf=quickstart", "model=quickstart"]), ("tiny_moe", ["model=tiny_moe"]), ("zero3", ["parallel=zero3"])],
)
def test_the_name_of_a_recipe_or_an_option_is_listed_with_its_override(
    name: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(f"ls {name}", capsys)
    assert (status, [line.split()[0] for line in out.splitlines()]) == (0, lines)


def test_only_runs_take_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("ls model x", capsys) == (
        2,
        "",
        "distrain: ls model takes no folder, but was given x: `distrain ls runs DIR` lists the runs of a folder\n",
    )


def test_json_of_ls_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    whole, part, key = (json.loads(call(f"ls {name} --json", capsys)[1]) for name in ("", "parallel", "parallel.zero"))
    assert whole["recipes"].keys() == config_files.recipes(None).keys()
    assert whole["groups"]["device"] == list(config_files.options("device", None))
    assert part["options"].keys() == config_files.options("parallel", None).keys()
    assert key["keys"][0]["choices"] == ["0", "1", "2", "3"]


# show --comments


@pytest.mark.parametrize("recipe", COMMENTED)
def test_commented_output_reads_back_as_the_same_run(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(f"show conf={recipe} --comments", capsys)
    (tmp_path / "mine.yaml").write_text(out)
    assert status == 0
    assert load_recipe(str(tmp_path / "mine.yaml")) == load_recipe(recipe)
    assert max(map(len, out.splitlines())) <= 140


@pytest.mark.parametrize("recipe", ["quickstart", "llama3_70b"])
def test_every_key_that_is_shown_has_its_comment(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, out = (call(f"show conf={recipe}{more}", capsys)[1].splitlines() for more in ("", " --comments"))
    assert [line.partition("  # ")[0] for line in out] == plain
    bare = [line for line in out if "  # " not in line and not line.lstrip().startswith("- ")]
    above = {part for key in KEYS for part in (key.split(".")[:-1])}
    assert all(line.strip().removesuffix(":") in above for line in bare), bare
    assert f"  seq: {load_recipe(recipe).train.seq}  # length of a sequence (tokens)" in out


texts = st.text(st.characters(codec="utf-8"), max_size=60)


@example(name="\x85", path=["\u2028"])
@given(name=texts, path=st.lists(texts, max_size=3))
def test_comments_change_no_value_for_any_text(name: str, path: list[str]) -> None:
    plain = {"name": name, "data": {"path": path, "tokenizer": name}, "log": {}, "train": {"seq": 8, "steps": None}}
    text = config_yaml(plain)
    comments = key_comments()
    assert yaml_edit.text_values(yaml_edit.add_comments(text, comments)) == yaml_edit.text_values(text)
    import yaml

    assert yaml.safe_load(yaml_edit.add_comments(text, comments)) == yaml.safe_load(text)


@given(old=texts, new=texts)
def test_a_replaced_value_reads_back_unchanged(old: str, new: str) -> None:
    import yaml

    text = f"a: {yaml_edit.scalar(old)}  # first\nb: [x, {{c: {yaml_edit.scalar(new)}}}]\n"
    read = yaml.safe_load(yaml_edit.replace_values(text, {"a": new, "nowhere": "x"}))
    assert read == {"a": new, "b": ["x", {"c": new}]}
