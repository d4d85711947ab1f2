"""`distrain cp`: a copy of a recipe plans the same under its own name; no file is ever overwritten."""

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from distrain.cli.config.load import load_recipe
from distrain.cli.keys import config_files
from distrain.cli.recipe_files.recipe_copy import NewFile
from distrain.tests.fakes.run_command import run_command
from distrain.trainer.spec.problem import Unreadable

# Recipes of unlike lines: few and many, with comments, lists, braces and null, with files beside them. A copy is made line by line.
COPIED = ("quickstart", "deepseek_v3", "llama3_8b_finetune", "llama3_8b_ethernet", "megatron_1t_6x8x64", "mixtral_8x7b", "nano_shakespeare")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("recipe", COPIED)
def test_a_copy_of_a_recipe_keeps_every_line_but_the_name_and_is_the_same_run(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_command(f"cp {recipe} mine.yaml", capsys)
    assert (status, err) == (0, "")
    assert out.startswith("wrote mine.yaml; next: ")
    before, after = (path.read_text().splitlines() for path in (config_files.recipes(None)[recipe], Path("mine.yaml")))
    assert [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]] == [(f"name: {recipe}", "name: mine")]
    assert load_recipe("./mine.yaml") == replace(load_recipe(recipe), name="mine")


def test_cp_prints_a_command_that_plans_the_copy(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_command("cp quickstart 'my run.yaml'", capsys)
    verb, *words = shlex.split(out.partition("; next: ")[2])[-2:]
    assert (verb, words) == ("plan", ["conf=./my run.yaml"])
    assert load_recipe("./my run.yaml").name == "my run"


@pytest.mark.parametrize("there", ["mine.yaml", "link.yaml"])
def test_no_file_is_overwritten(there: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("kept\n")
    Path("link.yaml").symlink_to("nowhere")
    status, _, err = run_command(f"cp quickstart {there}", capsys)
    assert (status, err) == (2, f"distrain: {there} already exists: name another file, or remove it first\n")
    assert Path("mine.yaml").read_text() == "kept\n"
    assert not Path("nowhere").exists()


def test_a_file_created_meanwhile_is_not_overwritten() -> None:
    Path("mine.yaml").write_text("kept\n")
    with pytest.raises(Unreadable, match=r"mine\.yaml already exists"), NewFile(Path("mine.yaml"), "new\n"):
        pass
    assert Path("mine.yaml").read_text() == "kept\n"


def test_no_folder_is_created(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("cp quickstart a/b/mine.yaml", capsys)[::2] == (
        2,
        "distrain: a/b/mine.yaml: there is no folder a/b: create it first\n",
    )
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("file", "written"),
    [
        ("mine", "mine.yaml"),
        ("there", "there/quickstart.yaml"),
        ("mine.v2", "mine.v2.yaml"),
        ("llama3.1_8b", "llama3.1_8b.yaml"),
        ("m.yml", "m.yml"),
    ],
)
def test_the_copy_gets_a_yaml_suffix_or_the_name_of_its_recipe(file: str, written: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("there").mkdir()
    assert run_command(f"cp quickstart {file}", capsys)[0] == 0
    assert load_recipe(written if "/" in written else f"./{written}").name == Path(written).stem


def test_a_dash_is_stdout_and_writes_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("cp quickstart -", capsys) == (0, config_files.recipes(None)["quickstart"].read_text(), "")
    assert os.listdir() == []


# Files beside a recipe


def test_a_copy_in_another_folder_refers_to_the_files_beside_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("theirs/weights", "mine"):
        Path(folder).mkdir(parents=True)
    Path("theirs/r.yaml").write_text("defaults: [quickstart]\nmodel:\n  weights: weights  # of theirs\n")
    assert run_command("cp theirs/r.yaml mine/", capsys)[0] == 0
    assert load_recipe("mine/r.yaml").model.weights == load_recipe("theirs/r.yaml").model.weights == str(tmp_path / "theirs" / "weights")
    assert "  # of theirs\n" in Path("mine/r.yaml").read_text()


def test_a_copy_that_would_not_load_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("theirs", "mine"):
        Path(folder).mkdir()
    Path("theirs/quick.yaml").write_text("defaults: [quickstart]\ntrain: {seq: 64}\n")
    Path("theirs/r.yaml").write_text("defaults: [quick]\n")
    status, out, err = run_command("cp theirs/r.yaml mine/", capsys)
    assert (status, out) == (2, "")
    assert err == (
        "distrain: mine/r.yaml would differ from theirs/r.yaml (mine/r.yaml: its defaults name recipe quick, which does not exist):"
        " copy it into the folder of theirs/r.yaml, which has the files that it names\n"
    )
    assert os.listdir("mine") == []


def test_a_copy_that_would_load_other_files_of_the_same_names_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for folder, seq in (("theirs", 64), ("mine", 32)):
        Path(folder).mkdir()
        Path(folder, "quick.yaml").write_text(f"defaults: [quickstart]\ntrain: {{seq: {seq}}}\n")
    Path("theirs/r.yaml").write_text("defaults: [quick]\n")
    status, _, err = run_command("cp theirs/r.yaml mine/", capsys)
    assert (status, err.partition(":")[0]) == (2, "distrain")
    assert "mine/r.yaml would differ from theirs/r.yaml: copy it into the folder of" in err
    assert os.listdir("mine") == ["quick.yaml"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("defaults: [quickstart]\n", "mine"),  # named by the recipe below it
        ("defaults: [quickstart]\nname: q${train.seq}\n", "mine"),
        ("name: | # folded\n  theirs\ndefaults: [quickstart]\n", "mine"),
        ("{defaults: [quickstart], name: theirs}\n", "mine"),
        ("'name':\ndefaults: [quickstart]\n", "mine"),
        ("name: &it theirs\ndefaults: [quickstart]\nlog: {dir: *it}\n", "theirs"),  # two keys refer to it
    ],
    ids=repr,
)
def test_a_copy_is_named_after_its_file_however_the_recipe_sets_its_name(text: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs.yaml").write_text(text)
    status, out, _ = run_command("cp theirs.yaml mine", capsys)
    assert status == 0
    assert load_recipe("./mine.yaml").name == name
    assert (", whose runs are still named theirs;" in out) == (name == "theirs")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"a: [", "FILE, line 1, column 5: expected the node content, but found '<stream end>'"),
        (b"\xff\xfe\x00", "FILE is not valid UTF-8: save it as UTF-8"),
        (b"defaults: [quikstart]\n", "FILE: its defaults name recipe quikstart, which does not exist: did you mean quickstart?"),
    ],
)
def test_a_file_that_is_no_recipe_is_not_copied(content: bytes, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs.yaml").write_bytes(content)
    status, _, err = run_command("cp theirs.yaml mine", capsys)
    assert (status, err.replace(str(tmp_path / "theirs.yaml"), "FILE").replace("theirs.yaml", "FILE")) == (2, f"distrain: {line}\n")
    assert os.listdir() == ["theirs.yaml"]


# Options of groups


def test_cp_prints_a_command_that_chooses_the_copied_option(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my/model").mkdir(parents=True)
    status, out, _ = run_command("cp model/tiny my/model/wide.yaml", capsys)
    words = shlex.split(out.partition("; next: ")[2])[-4:]
    assert (status, words) == (0, ["conf=quickstart", "model=wide", "--config-dir", "my"])
    assert load_recipe("quickstart", ["model=wide"], Path("my")) == load_recipe("quickstart", ["model=tiny"])


def test_an_option_copied_outside_its_group_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_command("cp model/tiny wide", capsys)
    assert out == "wrote wide.yaml; to use it, move it to DIR/model/ and add model=wide --config-dir DIR\n"


def test_an_option_that_would_include_itself_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my/parallel").mkdir(parents=True)
    status, _, err = run_command("cp parallel/zero3 my/parallel/default.yaml", capsys)
    assert (status, len(err.splitlines())) == (2, 1)
    assert os.listdir("my/parallel") == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("cp quikstart x", "no recipe quikstart: did you mean quickstart?"),
        ("cp model/tinny x", "no model tinny: did you mean tiny?"),
        ("cp quickstart mine.json", "mine.json does not end in .yaml or .yml: name it mine.yaml"),
        ("cp quickstart", "FILE is missing: write `distrain cp NAME FILE`"),
        ("cp nowhere/mine.yaml x", "conf=nowhere/mine.yaml: no such file: there is no folder nowhere"),
    ],
)
def test_wrong_arguments_print_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(words, capsys) == (2, "", f"distrain: {line}\n")


def test_a_full_disk_prints_one_line(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "full").write_bytes(b"0" * (1 << 20))
    status, _, err = run_command(f"cp quickstart {disk}/mine.yaml", capsys)
    assert (status, err) == (1, f"distrain: {disk}/mine.yaml can't be written (no space left on device): choose another file\n")
    assert not (disk / "mine.yaml").exists()
