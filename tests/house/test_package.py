"""The wheel contains `distrain` and nothing else, and the installed package works in any folder."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
LEFT_BEHIND = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "outputs")


def run_pip(*arguments: str | Path, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of this tree, because a build leaves folders behind and packs old ones."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    run_pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, folder / "tree", cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a folder outside the checkout and return the folder."""
    target = tmp_path_factory.mktemp("installed")
    run_pip("install", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


def run(installed: Path, cwd: Path, *arguments: str) -> str:
    """Run Python in a folder with the installed package first on its path; return its stdout. It must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-P", *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_contains_distrain_only(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {"distrain", "distrain-0.1.0.dist-info"}


def test_the_wheel_contains_every_module_and_yaml_file(names: set[str]) -> None:
    folders = [ROOT / Path(*package.split(".")[1:]) for package in SETUPTOOLS["packages"]]
    wanted = {path for folder in folders for pattern in ("*.py", "*.cpp") for path in folder.glob(pattern)}
    wanted |= {path for top in ("conf", "recipes") for path in (ROOT / top).rglob("*.yaml")}
    assert {f"distrain/{path.relative_to(ROOT).as_posix()}" for path in wanted} | {"distrain/py.typed"} == {
        name for name in names if name.startswith("distrain/")
    }


def test_the_wheel_contains_no_tests(names: set[str]) -> None:
    assert not [name for name in names if any(part.startswith("test") for part in Path(name).parts)]


def test_the_wheel_contains_the_licence_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    assert "Apache License" in archive.read("distrain-0.1.0.dist-info/licenses/LICENSE").decode()
    assert "distrain = distrain.__main__:main" in archive.read("distrain-0.1.0.dist-info/entry_points.txt").decode()


def test_an_installed_distrain_lists_its_recipes_from_any_folder(installed: Path, tmp_path: Path) -> None:
    assert Path(run(installed, tmp_path, "-c", "import distrain; print(distrain.__file__)").strip()).is_relative_to(installed)
    assert "quickstart" in run(installed, tmp_path, "-m", "distrain", "ls")


def test_an_installed_distrain_plans_from_any_folder(installed: Path, tmp_path: Path) -> None:
    assert '"fits": true' in run(installed, tmp_path, "-m", "distrain", "plan", "conf=quickstart", "--json")
