"""The YAML files of recipes and config groups: in the user's folder first, then the built-in ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from ...trainer.spec.problem import Problem, Unreadable, suggest_name
from ...trainer.system.regular_file import expand_home, read_plain, why_unreadable

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".yaml", ".yml")
PACKAGE_FOLDERS = (PACKAGE_ROOT, PACKAGE_ROOT / "conf")  # parents of the recipes and of the groups
MOST_BYTES = 256 << 10  # the largest file of a recipe or an option


def roots(config_dir: Path | None) -> tuple[Path, ...]:
    """Return the folders to search, in order; raises Unreadable if the user's can't be listed."""
    own: tuple[Path, ...] = ()
    if config_dir is not None:
        own_dir = expand_home(config_dir).absolute()
        if why := _why_not_listable(own_dir):
            raise Unreadable([Problem(rule="file", says=f"--config-dir={config_dir} {why}", mend="name one that exists")])
        own = tuple(folder for folder in (own_dir, own_dir / "recipes") if folder.is_dir())
    return (*own, PACKAGE_ROOT / "conf", PACKAGE_ROOT / "recipes")


def recipes(config_dir: Path | None) -> dict[str, Path]:
    """Return every recipe by name."""
    return _yaml_files(root for root in roots(config_dir) if root != PACKAGE_ROOT / "conf")


def groups(config_dir: Path | None) -> tuple[str, ...]:
    """Return every config group: the folders that contain YAML files."""
    names: set[str] = set()
    for root in roots(config_dir):
        names |= {name for name in os.listdir(root) if not name.startswith((".", "_")) and _yaml_files([root / name])}
    return tuple(sorted(names - {"recipes"}))


def options(group: str, config_dir: Path | None) -> dict[str, Path]:
    """Return every option of a group by name."""
    return _yaml_files((root / group for root in roots(config_dir)), suffixes=SUFFIXES[:1])


def first_comment(file: Path) -> str:
    """Return the text of a YAML file's first line if that is a comment, else ""; of a file that can't be read, why."""
    try:
        lines = read_plain(file, MOST_BYTES).decode("utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    first = next((line for line in lines if line.strip() not in ("", "---")), "")
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""


def suggest_option(name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown name: names that begin with it, else names that contain it, else the longest that it begins
    with, else the closest one."""
    known = sorted(names)
    longer = [each for each in known if name and each.startswith(name)]
    containing = [each for each in known if len(name) > 1 and name.lower() in each] if not longer else []
    begins = [] if longer or containing else sorted((each for each in known if name.startswith(each)), key=len)[-1:]
    for candidates in (longer, containing, begins):
        if 0 < len(candidates) < 6:
            return f"did you mean {' or '.join(candidates)}?"
    return suggest_name(name, known)


def recipe_path(conf: str, config_dir: Path | None) -> Path:
    """Return the file of `conf=`, which is a path or a recipe's name; raises Unreadable."""
    known = recipes(config_dir)
    if conf in known:
        return known[conf]
    path = expand_home(conf)
    if _is_path(conf):
        for each in _with_suffixes(path):
            if os.path.isfile(each):
                return each
        raise Unreadable([_missing_file_problem(conf, path)])
    here = next((each for each in _with_suffixes(path) if os.path.isfile(each)), None)
    is_model = conf in options("model", config_dir)
    other = f"it is a model: write model={conf} behind conf=RECIPE" if is_model else suggest_option(conf, known)
    mend = f"write conf=./{here} for the file in this folder" if here else other
    raise Unreadable([Problem(rule="conf", says=f"no recipe {conf}", mend=mend)])


def _missing_file_problem(conf: str, path: Path) -> Problem:
    folder = path.parent
    if os.path.isdir(path):
        return Problem(rule="file", says=f"conf={conf} is a folder", mend="name a YAML file in it")
    if entry := next((each for each in _with_suffixes(path) if os.path.lexists(each)), None):
        return Problem(rule="file", says=f"conf={conf} can't be read: {why_unreadable(entry)}", mend="name a plain YAML file")
    if not os.path.isdir(folder):
        return Problem(rule="file", says=f"conf={conf}: no such file", mend=f"there is no folder {folder}")
    if why := _why_not_listable(folder):
        return Problem(rule="file", says=f"conf={conf}: no such file", mend=f"{folder} {why}")
    names = [each.name for each in folder.iterdir() if each.suffix in SUFFIXES]
    here = "this folder" if folder == Path() else str(folder)
    mend = suggest_name(path.name, names) if names else f"{here} contains no YAML file"
    return Problem(rule="file", says=f"conf={conf}: no such file", mend=mend)


def _why_not_listable(folder: Path) -> str:
    """Return why a folder can't be listed; "" if it can."""
    if not os.path.isdir(folder):
        return "is not a folder"
    try:
        os.listdir(folder)
    except OSError as error:
        return f"can't be listed ({(error.strerror or str(error)).lower()})"
    return ""


def _is_path(conf: str) -> bool:
    return "/" in conf or os.sep in conf or conf.endswith(SUFFIXES)


def _with_suffixes(path: Path) -> Iterator[Path]:
    yield path
    for suffix in SUFFIXES if path.name else ():
        yield path.with_name(path.name + suffix)


def _yaml_files(folders: Iterator[Path] | list[Path], suffixes: tuple[str, ...] = SUFFIXES) -> dict[str, Path]:
    """Return YAML files by their names without suffix; of two with one name the first folder's wins."""
    files: dict[str, Path] = {}
    for folder in folders:
        found = _package_files(folder, suffixes) if folder.parent in PACKAGE_FOLDERS else _files_in(folder, suffixes)
        for stem, file in found.items():
            files.setdefault(stem, file)
    return dict(sorted(files.items()))


def _files_in(folder: Path, suffixes: tuple[str, ...]) -> Mapping[str, Path]:
    """Return the YAML files of one folder; none if it can't be listed."""
    files: dict[str, Path] = {}
    for name in _list_folder(folder) if os.path.isdir(folder) else ():
        stem, suffix = os.path.splitext(name)
        if suffix in suffixes and not name.startswith("."):
            files.setdefault(stem, folder / name)
    return files


_package_files = cache(_files_in)  # of folders of the package, which do not change


def _list_folder(folder: Path) -> list[str]:
    """Return the names in a folder; none if it can't be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def distrain_version() -> str:
    """Return the version of the installed distrain, or of the checkout."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("distrain")
    except PackageNotFoundError:
        import tomllib

        return str(tomllib.loads((PACKAGE_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
