"""`distrain ls`: recipes, config groups and keys, as lines or as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...trainer.rundir.run_summary import RUNS
from ...trainer.spec.problem import Problem, Unreadable, no_key_problem, one_line, suggest_name
from ...trainer.system.regular_file import read_plain
from ..keys import config_files
from .text_layout import Style, page_width, stdout_style, wrap

if TYPE_CHECKING:
    from ..keys.key_help import KeyHelp

RECIPES = "recipes"
ALMOST_SAME = 0.85  # likeness of two names that differ in a letter, as difflib measures it
SECTION_OF_GROUP = {"device": "cluster.device"}  # the section of a group's keys, where it has another name


def overview(config_dir: Path | None) -> str:
    """Every recipe with its description, and every group with its options."""
    groups = {group: ", ".join(config_files.options(group, config_dir)) for group in config_files.groups(config_dir)}
    recipes = _descriptions(config_files.recipes(config_dir))
    return "\n".join(
        ["Recipes (conf=NAME)", *_lines(recipes), "", "Groups (GROUP=NAME; `distrain ls GROUP` describes them)", *_lines(groups)]
    )


def description(name: str, config_dir: Path | None) -> str:
    """The options of the group `name`, then the keys of that name or section; of GROUP=NAME the option's file. Raises Unreadable where
    there are none."""
    if "=" in name:
        return _file_text(_option_file(name, config_dir))
    files, keys = _options_and_keys(name, config_dir)
    options = [line.strip() for line in _lines(_descriptions(files))]
    rows = key_lines(keys, stdout_style())
    return "\n".join(
        [*options, *(["", f"Keys of {name}" if name in config_files.groups(config_dir) else "Keys"] if files and rows else []), *rows]
    )


def key_lines(keys: Sequence[KeyHelp], style: Style) -> list[str]:
    """Two lines a key: the values it takes with their unit and default, then its description."""
    from ..keys.key_help import REQUIRED

    found: list[str] = []
    for row in keys:
        unit = f" ({row.unit})" if row.unit else ""
        default = row.default if row.default == REQUIRED else f"default {row.default}"
        null = f"{'' if row.default == 'null' else '; null'}: {row.null}" if row.null else ""
        first, *more = wrap(f"{row.key}  {row.takes}{unit}; {default}{null}")
        found += [first.replace(row.key, style.paint(row.key, "bold"), 1), *more, *wrap(row.says, indent="    ")]
    return found


def document(name: str | None, config_dir: Path | None) -> dict[str, Any]:
    """What `overview` or `description` show, as plain data."""
    from ..keys import key_help

    if name is None:
        groups = {group: list(config_files.options(group, config_dir)) for group in config_files.groups(config_dir)}
        return {"version": 1, "recipes": _descriptions(config_files.recipes(config_dir)), "groups": groups}
    if "=" in name:
        file = _option_file(name, config_dir)
        return {"version": 1, "options": _descriptions({name: file}), "keys": [], "text": _file_text(file)}
    files, keys = _options_and_keys(name, config_dir)
    return {"version": 1, "options": _descriptions(files), "keys": key_help.help_json(keys)}


def json_text(plain: object) -> str:
    """Plain data as one JSON document."""
    import json

    return json.dumps(plain, indent=2)


def _options_and_keys(name: str, config_dir: Path | None) -> tuple[Mapping[str, Path], list[KeyHelp]]:
    """The options and the keys of a name: of the group, key or section, else the options and sections that are called so, else those
    that are about such a word; raises Unreadable where there are none, or where one name is the same but for its spelling."""
    from ..keys.key_help import key_help
    from ..keys.key_search import keys_about, keys_with_part, options_about

    if name == RECIPES:
        return config_files.recipes(config_dir), []
    groups = config_files.groups(config_dir)
    options = config_files.options(name, config_dir) if name in groups else {}
    keys = key_help(SECTION_OF_GROUP.get(name, name))
    files = options or ({} if keys else _options_named(name, groups, config_dir))
    if files and not options:
        keys = keys_with_part(name)
    if not (files or keys):
        files, keys = options_about(name, config_dir), keys_about(name)
        if same := _same_name(name, groups, is_word=bool(files and keys)):
            raise Unreadable([same])
    if not (files or keys):
        raise Unreadable([_unknown_name(name, groups)])
    return files, keys


def _option_file(choice: str, config_dir: Path | None) -> Path:
    """The file of the option that GROUP=NAME chooses, or of the recipe of conf=NAME; raises Unreadable where there is none."""
    group, _, name = choice.partition("=")
    groups = config_files.groups(config_dir)
    if group not in (*groups, "conf"):
        raise Unreadable([Problem(rule="group", says=f"no group {group}", mend=suggest_name(group, (*groups, "conf")))])
    if group == "conf":
        return config_files.recipe_path(name, config_dir)
    options = config_files.options(group, config_dir)
    if name not in options:
        raise Unreadable([Problem(rule="option", says=f"{choice} names no {group}", mend=config_files.suggest_option(name, options))])
    return options[name]


def _file_text(file: Path) -> str:
    """A file's text, without control characters; raises Unreadable where it can't be read."""
    try:
        text = read_plain(file, config_files.MOST_BYTES).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise Unreadable([Problem(rule="file", says=f"{file} can't be read: {error.strerror or error}")]) from None
    return "\n".join(map(one_line, text.splitlines()))


def _options_named(name: str, groups: tuple[str, ...], config_dir: Path | None) -> dict[str, Path]:
    """The recipe, and the option of every group, called `name`: as a command line chooses them."""
    found = {f"conf={recipe}": file for recipe, file in config_files.recipes(config_dir).items() if recipe == name}
    for group in groups:
        found |= {f"{group}={option}": file for option, file in config_files.options(group, config_dir).items() if option == name}
    return found


def _same_name(name: str, groups: tuple[str, ...], *, is_word: bool) -> Problem | None:
    """The problem that no group and no key is called `name`, where another trainer's key is, or one of ours but for its section or a
    letter; else None. `is_word`: options and keys are about it, which say more than our key for another trainer's."""
    from difflib import get_close_matches

    from ..keys.key_search import keys_about
    from ..keys.keys import config_keys, same_named_keys
    from ..keys.synonyms import synonym_problem

    if not is_word and (problem := synonym_problem(name)):
        return problem
    if "." not in name and (near := get_close_matches(name, (*groups, RECIPES, RUNS), n=1, cutoff=ALMOST_SAME)):
        return Problem(rule="group", says=f"no group {name}", mend=f"did you mean {near[0]}?")
    same = same_named_keys(name, config_keys()) if not keys_about(name) else []
    return no_key_problem(name, f"did you mean {' or '.join(same)}?") if same else None


def _unknown_name(name: str, groups: tuple[str, ...]) -> Problem:
    """The problem that no group and no key is called `name`, and that none is about such a word, with the nearest name."""
    from ..keys.key_help import sections
    from ..keys.keys import config_keys, unknown_key_problem

    near = suggest_name(name, (*groups, RECIPES, RUNS))
    if "." not in name and near.startswith("did"):
        return Problem(rule="group", says=f"no group {name}", mend=near)
    wrong = unknown_key_problem(name, config_keys())
    if wrong is not None and wrong.mend.startswith("did"):
        return wrong
    others = [each for each in sections() if "." not in each and each not in groups]
    known = ", ".join([*sorted((*groups, *others)), RECIPES, RUNS])
    return Problem(rule="group", says=f"no group or key {name}", mend=f"known: {known}, and the keys in them")


def _descriptions(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: config_files.first_comment(file) for name, file in files.items()}


def _lines(rows: Mapping[str, str]) -> list[str]:
    widest = max(map(len, rows), default=0)
    return [_shorten(f"  {name.ljust(widest)}  {one_line(text)}".rstrip()) for name, text in rows.items()]


def _shorten(line: str) -> str:
    return line if len(line) <= page_width() else f"{line[: page_width() - 4].rstrip(' ,')} ..."
