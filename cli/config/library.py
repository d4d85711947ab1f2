"""Where recipes and config groups are found: a user's folder first, then the built-in ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...trainer.spec.plain_file import expand_home, read_plain, why_unreadable
from ...trainer.spec.problem import Problem, Unreadable, suggest_name

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".yaml", ".yml")
MOST_BYTES = 256 << 10  # of a recipe or an option


def roots(config_dir: Path | None) -> tuple[Path, ...]:
    """The folders that are searched, in order; raises Unreadable where the user's is none."""
    own: tuple[Path, ...] = ()
    if config_dir is not None:
        own_dir = expand_home(config_dir).absolute()
        if why := _why_not_listable(own_dir):
            raise Unreadable([Problem(rule="file", says=f"--config-dir={config_dir} {why}", mend="name one that exists")])
        own = tuple(folder for folder in (own_dir, own_dir / "recipes") if folder.is_dir())
    return (*own, PACKAGE_ROOT / "conf", PACKAGE_ROOT / "recipes")


def recipes(config_dir: Path | None) -> dict[str, Path]:
    """Every recipe by name."""
    return _yaml_files(root for root in roots(config_dir) if root != PACKAGE_ROOT / "conf")


def groups(config_dir: Path | None) -> tuple[str, ...]:
    """Every config group: the folders that hold YAML."""
    names: set[str] = set()
    for root in roots(config_dir):
        names |= {name for name in os.listdir(root) if not name.startswith((".", "_")) and _yaml_files([root / name])}
    return tuple(sorted(names - {"recipes"}))


def options(group: str, config_dir: Path | None) -> dict[str, Path]:
    """Every option of a group by name."""
    return _yaml_files((root / group for root in roots(config_dir)), suffixes=SUFFIXES[:1])


def first_comment(file: Path) -> str:
    """The first comment line of a YAML file."""
    try:
        lines = read_plain(file, MOST_BYTES).decode("utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        return f"can't be read: {error.strerror or error}"
    first = next((line for line in lines if line.strip() not in ("", "---")), "")
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""


def suggest_option(word: str, names: Iterable[str]) -> str:
    """The sentence for a name that is not there: what it begins, else its near miss."""
    known = sorted(names)
    begun = [name for name in known if word and name.startswith(word)]
    inside = [name for name in known if len(word) > 1 and word.lower() in name] if not begun else []
    for found in (begun, inside):
        if 0 < len(found) < 6:
            return f"did you mean {' or '.join(found)}?"
    return suggest_name(word, known)


def recipe_path(conf: str, config_dir: Path | None) -> Path:
    """The file that `conf=` names: a path, or a recipe's name; raises Unreadable."""
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
    mend = f"for the file in this folder write conf=./{here}" if here else suggest_option(conf, known)
    raise Unreadable([Problem(rule="conf", says=f"no recipe {conf}", mend=mend)])


def _missing_file_problem(conf: str, path: Path) -> Problem:
    folder = path.parent
    if os.path.isdir(path):
        return Problem(rule="file", says=f"conf={conf} is a folder", mend="name a YAML file in it")
    if there := next((each for each in _with_suffixes(path) if os.path.lexists(each)), None):
        return Problem(rule="file", says=f"conf={conf} can't be read: {why_unreadable(there)}", mend="name a plain file of YAML")
    if not os.path.isdir(folder):
        return Problem(rule="file", says=f"conf={conf}: no such file", mend=f"there is no folder {folder}")
    if why := _why_not_listable(folder):
        return Problem(rule="file", says=f"conf={conf}: no such file", mend=f"{folder} {why}")
    beside = [each.name for each in folder.iterdir() if each.suffix in SUFFIXES]
    mend = suggest_name(path.name, beside) if beside else f"no YAML file is in {folder}"
    return Problem(rule="file", says=f"conf={conf}: no such file", mend=mend)


def _why_not_listable(folder: Path) -> str:
    """Why a folder's files can't be listed; "" where they can."""
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
    """YAML files by their names without suffix; the first folder that has a name wins."""
    found: dict[str, Path] = {}
    for folder in folders:
        if os.path.isdir(folder):
            for name in _list_folder(folder):
                stem, suffix = os.path.splitext(name)
                if suffix in suffixes and not name.startswith("."):
                    found.setdefault(stem, folder / name)
    return dict(sorted(found.items()))


def _list_folder(folder: Path) -> list[str]:
    """The names in a folder; none where it can't be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def distrain_version() -> str:
    """The version of distrain: that of what is installed, or of the checkout."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("distrain")
    except PackageNotFoundError:
        import tomllib

        return str(tomllib.loads((PACKAGE_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
