"""The file of `--html`: refused before any work where it can't be written, never another program's, written whole or not at all."""

import json
import os
from pathlib import Path

import pytest

from distrain.cli.html import html_file
from distrain.tests.cli.test_startup import loaded_modules
from distrain.tests.fakes.html_page import HtmlPage
from distrain.tests.fakes.run_command import run_command

VERBS = ("plan conf=llama3_8b_1node", "plan -m conf=llama3_8b_1node train.microbatch=1,2", "report run", "report run run")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a run that has just begun."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/run.json").write_text('{"name": "run"}')


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_of_text_is_printed_as_before_and_then_the_name_of_the_file(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, plain, err = run_command(verb, capsys)
    assert run_command(f"{verb} --html page.html", capsys) == (status, f"{plain}wrote page.html\n", err)
    HtmlPage.read(Path("page.html"))
    assert sorted(os.listdir()) == ["page.html", "run"]


@pytest.mark.parametrize("verb", VERBS)
def test_json_is_all_of_stdout_where_a_page_is_written_too(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, plain, err = run_command(f"{verb} --json", capsys)
    assert run_command(f"{verb} --json --html page.html", capsys) == (status, plain, f"{err}wrote page.html\n")
    json.loads(plain)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("none/page.html", "none/page.html: there is no folder none: create it first"),
        ("page.pdf", "page.pdf does not end in .html or .htm: name it page.html"),
        ("-", "'-' is not the name of a file: name one that ends in .html"),
        ("''", "'' is not the name of a file: name one that ends in .html"),
        ("theirs.html", "theirs.html already exists: name another file, or remove it first"),
        ("link.html", "link.html already exists: name another file, or remove it first"),
        ("dangling.html", "dangling.html already exists: name another file, or remove it first"),
        ("fifo.html", "fifo.html already exists: name another file, or remove it first"),
        ("run/run.json/page.html", "run/run.json/page.html: there is no folder run/run.json: create it first"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    verb: str, file: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command("report run --html ours.html", capsys)
    Path("theirs.html").write_text("<p>theirs</p>")
    Path("link.html").symlink_to("ours.html")
    Path("dangling.html").symlink_to("nowhere")
    os.mkfifo("fifo.html")
    before = sorted(os.listdir())
    assert run_command(f"{verb} --html {file}", capsys) == (2, "", f"distrain: {line}\n")
    assert Path("theirs.html").read_text() == "<p>theirs</p>"
    assert sorted(os.listdir()) == before


def test_a_folder_that_can_only_be_read_is_refused_before_any_work(read_only_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = read_only_disk / "page.html"
    says = f"{file} can't be written: no file can be created in {read_only_disk}: choose another folder"
    for verb in VERBS:
        assert run_command(f"{verb} --html {file}", capsys) == (2, "", f"distrain: {says}\n")


def test_a_page_of_ours_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    run_command("report run --html page.html", capsys)
    assert run_command("plan conf=llama3_8b_1node --html page.html", capsys)[0] == 0
    assert HtmlPage.read(Path("page.html")).texts("h1") == ["llama3_8b_1node"]


@pytest.mark.parametrize(
    ("verb", "file", "written"),
    [
        ("plan conf=llama3_8b_1node", "plan", "plan.html"),
        ("plan conf=llama3_8b_1node", "plan.v2", "plan.v2.html"),
        ("plan conf=llama3_8b_1node", "page.htm", "page.htm"),
        ("plan conf=llama3_8b_1node", ".", "llama3_8b_1node.html"),
        ("plan conf=llama3_8b_1node name=../../x", "run", "run/x.html"),
        ("report run", ".", "run.html"),
        ("report run run", ".", "run-run.html"),
    ],
)
def test_a_file_without_a_suffix_gets_one_and_a_folder_gets_a_file(
    verb: str, file: str, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run_command(f"{verb} --html {file}", capsys)
    assert out.splitlines()[-1] == f"wrote {written}"
    assert Path(written).is_file()


@pytest.mark.parametrize("verb", VERBS)
def test_a_disk_that_fills_up_costs_one_line_and_no_file(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    run_command("report run --html page.html", capsys)
    before = Path("page.html").read_bytes()
    monkeypatch.setattr(html_file, "write_atomically", full)
    status, out, err = run_command(f"{verb} --html page.html", capsys)
    assert (status, err) == (1, "distrain: page.html can't be written (no space left on device): choose another file\n")
    assert "wrote" not in out
    assert Path("page.html").read_bytes() == before


def test_wrong_recipes_and_folders_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("plan conf=nowhere", "plan conf=quickstart model.layer=3", "report nowhere", "report run nowhere"):
        status, out, err = run_command(f"{words} --html page.html", capsys)
        assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert os.listdir() == ["run"]


def test_nothing_of_html_is_loaded_until_it_is_asked_for() -> None:
    names = loaded_modules("plan", "conf=llama3_8b_1node")
    assert not [name for name in names if name.startswith(("distrain.cli.html", "distrain.cli.drawings"))]
