"""Rules of the code base: allowed imports, modules without heavy imports, packaged folders, and the form of a module."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = ("cli", "conf", "recipes", "scripts", "trainer")

# A floor imports those below it that its row names. Scripts stand outside and may import all.
PLANNED = ("trainer.spec", "trainer.models", "trainer.plan")
LIGHT_FLOORS = (*PLANNED, "trainer.system", "trainer.rundir", "trainer.machine", "trainer.launch", "trainer.prove")
# fmt: off
FLOORS = {
    "trainer.spec":     ((),                                                        {"msgspec"}),
    "trainer.system":   (("trainer.spec",),                                         set()),
    "trainer.layers":   (("trainer.spec",),                                         {"torch"}),
    "trainer.models":   (("trainer.spec", "trainer.system", "trainer.layers"),      set()),
    "trainer.plan":     (("trainer.spec", "trainer.models"),                        set()),
    "trainer.rundir":   ((*PLANNED, "trainer.system"),                              {"msgspec"}),
    "trainer.machine":  (("trainer.spec", "trainer.system"),                        {"msgspec"}),
    "trainer.launch":   ((*PLANNED, "trainer.system", "trainer.rundir", "trainer.machine"), {"msgspec"}),
    "trainer.prove":    (LIGHT_FLOORS,                                              {"msgspec"}),
    "cli":              (LIGHT_FLOORS,                              {"typer", "msgspec", "hydra", "omegaconf", "yaml"}),
    "trainer.parallel": ((*PLANNED, "trainer.layers"),                              {"torch"}),
    "trainer.engines":  ((*PLANNED, "trainer.layers", "trainer.parallel"),          {"torch", "deepspeed"}),
    "trainer.loop":     (
        (*LIGHT_FLOORS, "trainer.layers", "trainer.parallel", "trainer.engines"),
        {"torch", "wandb", "numpy", "safetensors", "msgspec", "tokenizers", "jinja2"},
    ),
}
# fmt: on
DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "pyyaml"}  # where a package is not named as what holds it
TORCH_HALF = ("trainer.parallel", "trainer.layers", "trainer.engines", "trainer.loop")
HEAVY = {"torch", "deepspeed", "numpy", "transformers", "wandb"}
HYDRA = {"hydra", "omegaconf"}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc", "base", "manager", "core"}
MOST_LINES = 350


def module_name(path: Path) -> str:
    """A file's module below `distrain`: trainer/plan/layout/mesh.py -> trainer.plan.layout.mesh, cli/__init__.py -> cli."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def is_under(name: str, floor: str) -> bool:
    return name == floor or name.startswith(f"{floor}.")


def floor_of(name: str) -> str | None:
    return next((floor for floor in FLOORS if is_under(name, floor)), None)


FILES = {module_name(path): path for top in OURS for path in sorted((ROOT / top).rglob("*.py"))}
MODULES = sorted(name for name, path in FILES.items() if path.stat().st_size)
# A family's module.py is the torch half of its folder, and these of models/; scripts are no part of the light half.
TORCH_MODELS = (
    "trainer.models.build",
    "trainer.models.moe.routing",
    "trainer.models.moe.routing_counts",
    "trainer.models.hf_format.weights",
    "trainer.models.hf_format.sliced_weight",
    "trainer.models.hf_format.tensor_reader",
    "trainer.models.hf_format.transformers_weights",
    "trainer.models.hf_format.adapter",
    "trainer.models.hf_format.adapter_reader",
)
LIGHT = [
    name
    for name in sorted(FILES)
    if (floor := floor_of(name))
    and floor not in TORCH_HALF
    and not (floor == "trainer.models" and (name.endswith(".module") or name in TORCH_MODELS))
]


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


def outermost(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: all but the bodies of functions, and what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from outermost(node)


@cache
def imports(name: str, *, on_import: bool = False) -> frozenset[str]:
    """Return the absolute names that a module imports, as `distrain.cli.app`: all of them, or those at the module's top level."""
    path, tree = FILES[name], tree_of(name)
    package = ["distrain", *name.split(".")][: None if path.name == "__init__.py" else -1]
    found: set[str] = set()
    for node in outermost(tree) if on_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            modules = {f"{base}.{alias.name}" for alias in node.names} & {f"distrain.{other}" for other in FILES}
            found.update(modules or {base})
    return frozenset(found)


def own(names: Iterable[str]) -> set[str]:
    """Of absolute names, those of this package, without its name."""
    return {name.removeprefix("distrain.") for name in names if name.startswith("distrain.")}


def others(names: Iterable[str]) -> set[str]:
    """Return the packages of absolute names that are neither distrain nor in the standard library."""
    return {top for name in names if (top := name.partition(".")[0]) not in {"distrain", *sys.stdlib_module_names}}


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Return one circle of a graph of imports, first and last node the same; [] where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions count too: none hides a circle."""
    assert circles({name: own(imports(name)) & set(FILES) - {name} for name in FILES}) == []


def folder_of(name: str) -> str:
    """The folder of a module: trainer.plan.layout of trainer.plan.layout.mesh, and of trainer.plan.layout itself."""
    return name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]


def test_no_folders_import_each_other_in_a_circle() -> None:
    """A folder is what lies in it directly: one that imports the folder it lies in would make a circle too."""
    graph: dict[str, set[str]] = {}
    for name in FILES:
        graph.setdefault(folder_of(name), set()).update({folder_of(other) for other in own(imports(name)) & set(FILES)} - {folder_of(name)})
    assert circles(graph) == []


def test_a_class_name_is_one_class() -> None:
    places: dict[str, list[str]] = {}
    for name in FILES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_what_is_installed_imports_no_tests() -> None:
    assert not [name for name in FILES if any(is_under(other, "tests") for other in own(imports(name)))]


def test_the_packages_list_is_the_folders() -> None:
    folders = {"distrain", *(f"distrain.{name}" for name, path in FILES.items() if path.name == "__init__.py")}
    assert sorted(folders) == PROJECT["tool"]["setuptools"]["packages"]


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in FILES.values()}
    assert not [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()]


def test_tests_is_no_package() -> None:
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()


def test_a_module_imports_lower_floors_only() -> None:
    wrong = dict[str, str]()
    for name in MODULES:
        floor = floor_of(name)
        if floor is None:
            assert not name.startswith(("conf", "recipes")), "conf/ and recipes/ hold YAML, not code"
            continue
        below, _ = FLOORS[floor]
        outside = {other for other in own(imports(name)) if not any(is_under(other, allowed) for allowed in (floor, *below))}
        if outside:
            wrong[name] = f"{sorted(outside)}: it stands on {floor}, which may import {below or 'nothing of ours'}"
    assert wrong == {}


def test_a_light_module_imports_its_floors_packages_only() -> None:
    """A heavy package may be imported inside the function that it serves."""
    at_once, later = dict[str, set[str]](), dict[str, set[str]]()
    for name in LIGHT:
        _, allowed = FLOORS[str(floor_of(name))]
        at_once[name] = others(imports(name, on_import=True)) - allowed
        later[name] = others(imports(name)) - allowed - HEAVY
    assert {name: packages for name, packages in at_once.items() if packages} == {}
    assert {name: packages for name, packages in later.items() if packages} == {}


def test_every_imported_package_is_a_stated_dependency() -> None:
    stated = {Requirement(line).name for line in PROJECT["project"]["dependencies"]}
    unstated = {name: {DISTRIBUTIONS.get(package, package) for package in others(imports(name))} - stated for name in MODULES}
    assert {name: packages for name, packages in unstated.items() if packages} == {}


def test_hydra_and_yaml_are_imported_in_four_files_each() -> None:
    assert [name for name in MODULES if others(imports(name)) & HYDRA] in (
        [],
        ["cli.arguments.override_grammar", "cli.config.composition", "cli.config.recipe_defaults", "cli.config.yaml_file"],
    )
    assert [name for name in MODULES if "yaml" in others(imports(name))] in (
        [],
        ["cli.config.composition", "cli.config.yaml_errors", "cli.config.yaml_file", "cli.recipe_files.yaml_edit"],
    )


def test_the_light_half_imports_without_the_heavy_packages() -> None:
    program = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(HEAVY)!r}:
            raise ImportError(name + " is heavy")

sys.meta_path.insert(0, Absent())
for name in {LIGHT!r}:
    importlib.import_module("distrain." + name)
print(*sorted(set(sys.modules) & set({sorted(HEAVY)!r})))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_module_says_in_one_sentence_what_it_owns() -> None:
    said = {name: (ast.get_docstring(tree_of(name)) or "").split("\n\n")[0] for name in MODULES}
    assert {name: words for name, words in said.items() if not re.fullmatch(r".*[.:]", words, flags=re.DOTALL)} == {}


def test_a_file_is_one_thing() -> None:
    paths = [FILES[name] for name in MODULES]
    assert [path for path in paths if {path.stem, path.parent.name} & FORBIDDEN_NAMES] == []
    assert [path for path in paths if len(path.read_text().splitlines()) > MOST_LINES] == []


def test_the_lock_holds_every_requirement() -> None:
    rows = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.]+", row) for row in rows), "an exact version a line, and nothing else"
    locked = dict(row.split("==") for row in rows)
    extra = [Requirement(line) for line in PROJECT["project"]["optional-dependencies"]["dev"]]
    for wanted in (*map(Requirement, PROJECT["project"]["dependencies"]), *extra):
        assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)], prereleases=True), str(wanted)


def test_this_environment_is_the_lock() -> None:
    """Holds for `scripts/test`, whose environment it is; another environment's versions are its own affair."""
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("not the environment that scripts/setup.sh made")
    from importlib.metadata import version

    rows = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    wrong = [row for row in rows if version(row.split("==")[0]).partition("+")[0] != row.split("==")[1]]
    assert not wrong


def test_contributing_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    planned = {"trainer/parallel/", "trainer/engines/", "trainer/loop/"}
    paths = {word for word in re.findall(r"`([\w./]+)`", text) if "/" in word and "NAME" not in word} - planned
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]
    for table, path in re.findall(r"`([A-Z_]+)`(?: or `[A-Z_]+`)? in `([\w./]+)`", text):
        assert re.search(rf"^{table}\b", (ROOT / path).read_text(), flags=re.MULTILINE), f"{table} in {path}"
