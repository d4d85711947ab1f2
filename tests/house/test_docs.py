"""README and docs: short, linked, in the source distribution, and in step with the program."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distrain.cli.app import VERBS
from distrain.cli.drawings.plan_drawing import KINDS, MEMORY, draw_plan
from distrain.cli.keys.keys import config_keys
from distrain.scripts.shown_output import BLOCK, page_of_today, shorten

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MISTAKES = {"model.layer", "train.precison", "train.epochs", "model.layers.61.enorm"}
FILE_ENDINGS = {"md", "jsonl", "py", "safetensors"}
PICTURE = ROOT / "docs" / "plan.svg"
PICTURED = "megatron_1t_6x8x64"
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "outputs")
SDIST = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_readme_links_every_page_of_the_docs() -> None:
    text = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES if page.parent == ROOT / "docs" and f"(docs/{page.name})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_what_to_type(page: Path) -> None:
    """A title, then within the first lines a command or a table of them; a page's figures come behind it."""
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert re.search(r"(^|`|\$ )(distrain [a-z]+|python -m distrain\.\w+|bash scripts/\w+)", "\n".join(lines[1:25]), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    paths = {path for path in re.findall(r"`((?:trainer|cli|conf|recipes|scripts|tests|docs)/[\w./]+)`", text) if "NAME" not in path}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_that_a_page_names_exist(page: Path) -> None:
    """Those that another trainer has, or that a page shows as mistakes, are left out."""
    keys = config_keys()
    sections = {key.rpartition(".")[0] for key in keys} | {"parallel.sync", "data.validate"}
    begins = "|".join(sorted({key.partition(".")[0] for key in keys if "." in key}))
    text = page.read_text() if page.name != "coming_from.md" else ""
    named = set(re.findall(rf"(?<![\w/.-])((?:{begins})(?:\.\w+)+)(?=[=`,\s\]|)])", text)) - MISTAKES
    wrong = {name for name in named if name not in keys and name not in sections and name.rpartition(".")[0] != "data.validate"}
    assert {name for name in wrong if name.rpartition(".")[2] not in FILE_ENDINGS} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_scripts_and_verbs_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    recipes = set(re.findall(r"conf=(\w+)(?=[\s`)])", text)) - {"NAME", "RECIPE"}
    assert [name for name in sorted(recipes) if not (ROOT / "recipes" / f"{name}.yaml").exists()] == []
    scripts = [name.replace(".", "/") for name in re.findall(r"python3? -m distrain\.(scripts[\w.]*\w)", text)]
    assert [name for name in scripts if not (ROOT / f"{name}.py").exists() and not (ROOT / name / "__main__.py").exists()] == []
    verbs = set(re.findall(r"(?:`|^\$ |^)distrain ([a-z]+)\b", text, re.MULTILINE))
    assert verbs - {function.__name__ for function, _ in VERBS} == set()


def test_headline_figures_are_those_of_the_page_of_published_runs() -> None:
    """Step times as fitted and without a source, and memory, wherever README and the page of plans state them."""
    published = (ROOT / "docs" / "published.md").read_text()
    rows = (r"^\| as fitted \| ([\d.]+ %)", r"^\| leave one source out \| ([\d.]+ %)", r"^\| peak memory \| median ([\d.]+ %)")
    fitted, unseen, memory = (re.findall(row, published, re.MULTILINE)[0] for row in rows)
    for page, figures in ((ROOT / "README.md", (fitted, unseen, memory)), (ROOT / "docs" / "plans.md", (fitted, memory))):
        assert [each for each in figures if each not in page.read_text()] == []
    assert [each for each in (fitted, unseen, memory) if f"**{each}**" not in published] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    outside = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", outside, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_pages_name_headings(page: Path) -> None:
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    pages = [(page.parent / name if name else page, anchor) for name, _, anchor in links if anchor]
    assert [(str(target), anchor) for target, anchor in pages if anchor not in headings(target)] == []


@pytest.fixture(scope="module")
def plan() -> dict[str, object]:
    words = [sys.executable, "-m", "distrain", "plan", f"conf={PICTURED}", "--json"]
    return dict(json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout))


def test_the_picture_is_of_todays_plan(plan: dict[str, object]) -> None:
    """Fix: distrain plan conf=megatron_1t_6x8x64 --json | python -m distrain.scripts.draw_plan > docs/plan.svg."""
    assert PICTURE.read_text() == draw_plan(plan)


def test_the_timeline_is_of_todays_plan(tmp_path: Path) -> None:
    """Fix: run the command below the picture in docs/timeline.md, without the old picture."""
    found = re.search(r"^`distrain (simulate [^`]*) --svg (docs/\S+)`$", (ROOT / "docs" / "timeline.md").read_text(), re.MULTILINE)
    assert found
    words = [sys.executable, "-m", "distrain", *found[1].split(), "--svg", str(tmp_path / "now.svg")]
    subprocess.run(words, capture_output=True, check=True)
    assert (tmp_path / "now.svg").read_text() == (ROOT / found[2]).read_text()


def test_a_stages_column_is_as_tall_as_its_memory(plan: dict[str, object]) -> None:
    colours = {colour for _, _, colour in KINDS}
    boxes = [box for box in ElementTree.fromstring(draw_plan(plan)).iter("{http://www.w3.org/2000/svg}rect") if box.get("fill") in colours]
    columns = defaultdict[str, float](float)
    for box in boxes:
        columns[box.attrib["x"]] += float(box.attrib["height"]) if float(box.attrib["y"]) < sum(MEMORY) else 0
    memory = dict(plan)["memory"]
    assert isinstance(memory, dict)
    assert max(columns.values()) == pytest.approx(MEMORY[1] * memory["peak"] / memory["capacity"], abs=0.05)


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name)
def test_shown_output_is_todays(page: Path) -> None:
    """Fix: python -m distrain.scripts.shown_output, and read what it changed."""
    text = page.read_text()
    assert page_of_today(text).splitlines() == text.splitlines()


def test_output_that_is_not_todays_is_replaced() -> None:
    command = "$ distrain plan conf=llama3_70b gradient_accumulation_steps=8"
    page = "Before\n```\n{}\ndistrain: {}\n```\nafter\n"
    today = "no key gradient_accumulation_steps: train.batch = dp x train.microbatch x accumulation steps"
    assert page_of_today(page.format(command, "an old line")) == page.format(command, today)


@pytest.mark.parametrize(
    ("shown", "today"),
    [(["x"], ["1", "2", "3"]), (["..."], ["..."]), (["x", "..."], ["1", "..."]), (["...", "x", "y"], ["...", "2", "3"])],
)
def test_lines_that_are_left_out_stay_so(shown: list[str], today: list[str]) -> None:
    assert shorten(["1", "2", "3"], shown) == today


def test_the_source_distribution_has_docs_and_tests(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    done = subprocess.run([sys.executable, "-c", SDIST, str(tmp_path)], cwd=tmp_path / "tree", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {path.relative_to(ROOT).as_posix() for path in (*PAGES, PICTURE, Path(__file__), ROOT / "scripts" / "test")}
    assert wanted - names == set()
