"""Arguments of a command line: `conf=NAME` and overrides, sorted and checked before a recipe is composed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...trainer.spec.problem import Problem, plain_characters, suggest_name
from ...trainer.spec.read import type_text
from ..keys import config_files, synonyms
from ..keys.answer_summary import nothing_means
from ..keys.keys import config_keys, takes_text, unknown_key_problem, write_instead
from .cluster_argument import is_shape
from .verb_words import early_option

LONGEST_ARGUMENT = 10_000  # characters


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The recipe that `conf=` names, the overrides, and problems that need no recipe to be seen."""

    conf: str
    overrides: tuple[str, ...]
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...] = ()  # overrides without effect


def read_arguments(arguments: Sequence[str], verb: str, config_dir: Path | None) -> Arguments:
    """Sort the arguments of `distrain VERB conf=NAME [KEY=VALUE ...]`."""
    arguments, spaced = _join_spaced(arguments, config_dir)
    arguments, with_comma = _without_last_commas(arguments)
    confs = [each.removeprefix("conf=") for each in arguments if each.startswith("conf=")]
    rest = [each for each in arguments if not each.startswith("conf=")]
    lone = [each for each in rest if "=" not in each and not each.startswith("~")]
    too_long = [each for each in rest if len(each) > LONGEST_ARGUMENT and each not in lone]
    problems = spaced + with_comma + [_lone_argument_problem(each, config_dir) for each in lone]
    has_conf_problem = any(each.rule == "conf" for each in problems)
    if (conf_problem := _conf_problem(confs, verb)) and (confs or not has_conf_problem):
        problems.insert(0, conf_problem)
    problems += [
        Problem(rule="syntax", says=f"{each} has {len(each):,} characters", mend="put it in a recipe and write conf=FILE")
        for each in too_long
    ]
    overrides = tuple(each for each in rest if each not in lone and each not in too_long)
    return Arguments(
        conf=confs[0] if confs else "", overrides=overrides, problems=tuple(problems), warnings=tuple(_repetition_warnings(overrides))
    )


def _join_spaced(arguments: Sequence[str], config_dir: Path | None) -> tuple[list[str], list[Problem]]:
    """Return the arguments with KEY = VALUE and KEY VALUE, which a shell passes as two or three, as one each, and a problem for each of
    these."""
    joined: list[str] = []
    spaced: set[int] = set()
    problems: list[Problem] = []
    for argument in arguments:
        last = joined[-1] if joined else ""
        is_open = last.endswith("=") and last.count("=") == 1 and "=" not in argument
        if _names_key(last, config_dir) and "=" not in argument and not _names_key(argument, config_dir):
            joined[-1] = f"{last}={argument}"
            problems.append(Problem(rule="syntax", says=f"{last} {argument} has no equals sign", mend=f"write {joined[-1]}"))
        elif last and (is_open or (argument.startswith("=") and "=" not in last)):
            joined[-1] += argument
            spaced.add(len(joined) - 1)
        else:
            joined.append(argument)
    wrong = [joined[at] for at in sorted(spaced) if not joined[at].endswith("=")]
    problems += [Problem(rule="syntax", says=f"{each} is typed with a space beside =", mend="leave it out") for each in wrong]
    return joined, problems


def _names_key(argument: str, config_dir: Path | None) -> bool:
    """Whether an argument is the whole name of a key or of a group, without a value."""
    return argument == "conf" or argument in config_keys() or argument in config_files.groups(config_dir)


def _without_last_commas(arguments: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Return the arguments without a comma at the end, as those of a call in Python have it, and a problem if there were any."""
    wrong = [each for each in arguments if "=" in each and each.endswith(",")]
    if not wrong:
        return list(arguments), []
    says = f"{wrong[0]} ends with a comma" if len(wrong) == 1 else f"{len(wrong)} arguments end with a comma, the first is {wrong[0]}"
    mend = "leave it out" if len(wrong) == 1 else "leave the commas out"
    return [each.rstrip(",") if each in wrong else each for each in arguments], [Problem(rule="syntax", says=says, mend=mend)]


def _conf_problem(confs: Sequence[str], verb: str) -> Problem | None:
    if len(confs) > 1:
        says = f"conf is given {len(confs)} times ({', '.join(confs)})"
        several = shlex.quote(f"conf={','.join(confs)}")
        are_plans = verb == "plan" and all(confs) and len(set(confs)) == len(confs)
        compare = f", or compare them with distrain plan -m {several}" if are_plans else ""
        return Problem(rule="conf", says=says, mend=f"give it once{compare}")
    if not confs:
        return Problem(rule="conf", says="conf=NAME is missing", mend=f"write `distrain {verb} conf=NAME`; `distrain ls` lists the recipes")
    return None if confs[0] else Problem(rule="conf", says="conf= names no recipe", mend="`distrain ls` lists them")


def _repetition_warnings(overrides: Sequence[str]) -> Iterator[Problem]:
    """Yield a warning for each override that a later one of the same key replaces. `cluster=NAME` and `cluster=SIZE` both count."""
    last: dict[tuple[str, bool], str] = {}
    for override in reversed(overrides):
        key, _, value = override.partition("=")
        target = (key.lstrip("+~"), is_shape(value))
        if target in last:
            yield Problem(rule="idle", says=f"{override} does nothing", mend=f"{last[target]} replaces it")
        last.setdefault(target, override)


def _lone_argument_problem(argument: str, config_dir: Path | None) -> Problem:
    """Return the problem of an argument without an equals sign."""
    neither = f"{argument} is neither conf=NAME nor KEY=VALUE"
    if argument in config_files.recipes(config_dir) or os.path.isfile(argument):
        return Problem(rule="conf", says=neither, mend=f"write conf={argument}")
    key = argument.lstrip("+")
    if key in config_files.groups(config_dir):
        return Problem(rule="syntax", says=f"{argument} has no value", mend=f"write {argument}=NAME; `distrain ls {key}` lists the names")
    if not unknown_key_problem(key, config_keys()):
        return Problem(rule="syntax", says=f"{argument} has no value", mend=f"write {argument}=VALUE")
    if synonym := synonyms.synonym_problem(key):
        return synonym
    hint = config_files.suggest_option(argument, config_files.recipes(config_dir))
    if hint.startswith("did"):
        return Problem(rule="conf", says=neither, mend=hint.replace("mean ", "mean conf=").replace(" or ", " or conf="))
    return Problem(rule="syntax", says=f"{argument!r} is neither conf=NAME nor KEY=VALUE")


def syntax_problem(override: str, known: Mapping[str, Any]) -> Problem:
    """Return the problem of an override that Hydra's grammar can't read."""
    key, _, value = override.partition("=")
    if not key.strip("+~ "):
        return Problem(rule="syntax", says=f"{override} has no key", mend="write KEY=VALUE")
    if not value:
        return Problem(rule="syntax", says=f"{override} has no value", mend=f"write {key}=VALUE")
    if value.startswith("interval("):
        return Problem(rule="syntax", says=f"{override} is not a finite list of values", mend=f"write {key}=range(START,STOP,STEP)")
    if value.startswith("="):
        return Problem(rule="syntax", says=f"{override} has two equals signs", mend=f"write {key}={value.lstrip('=')}")
    name = key.lstrip("+~").split("@")[0]
    wrong_key = unknown_key_problem(name, known, value.strip(" '\""))
    if wrong_key and not re.fullmatch(r"[\w-]+([./][\w-]+)*", name, flags=re.ASCII):
        return Problem(rule="syntax", says=f"{override}: {name} is not a key", mend=wrong_key.mend, settings=wrong_key.settings)
    if (plain := plain_characters(value)) != value:
        return Problem(rule="syntax", says=f"{override}: the value can't be read", mend=f"write {key}={plain}")
    if name in known and not takes_text(known[name]) and not re.search(r"[\[\](){}'\"]", value):
        says = f"{key}={value} is not {type_text(known[name])}"
        return Problem(rule="type", says=says, mend="give the token's id" if name == "data.end" else "")
    mend = "write one comma between two entries" if re.search(r"[\[{,]\s*,", value) else "close every bracket and quote"
    return Problem(rule="syntax", says=f"{override}: the value can't be read", mend=mend)


def option_problems(error: Any, argv: Sequence[str] = ()) -> list[Problem]:
    """Return the problems of wrong options from click's `error`, which names the first; `argv` is the command line that has them."""
    name = getattr(error, "option_name", None)
    context = error.ctx
    if (
        context
        and getattr(error, "param_hint", 0) is None
        and type(error).__name__ == "MissingParameter"
        and not error.param.opts[0].startswith("-")
    ):
        return [_missing_argument_problem(error.param, context)]
    message = str(error.format_message()).splitlines()[0].rstrip(".")
    if name is None or not message.startswith("No such option"):
        return [Problem(rule="option", says=message[:1].lower() + message[1:])]
    parameters = context.command.params if context else []
    known = [*(each for row in parameters for each in row.opts if each.startswith("--")), "--help"]
    verbs = getattr(context.command, "commands", {}) if context else {}
    takes_keys = verbs or any(row.name == "arguments" for row in parameters)  # of a recipe
    options_of_verbs = {verb: {option for row in each.params for option in row.opts} for verb, each in verbs.items()}
    mends: dict[str, list[str]] = {}
    settings: dict[str, tuple[str, ...]] = {}
    for option in dict.fromkeys([name, *_unknown_options(argv, known)] if takes_keys and not verbs else [name]):
        word = "conf" if option in ("-c", "-C") else option.lstrip("-")  # -c names the file of a configuration in other programs
        key = key_instead_of_option(word, _option_value(option, argv)) if takes_keys else None
        early = early_option(option, argv, options_of_verbs)
        mend = early or (key.mend if key else suggest_name(option, known))
        mends.setdefault("" if mend.startswith("known: ") else mend, []).append(option)
        settings[mend] = key.settings if key and not early else ()
    without = mends.pop("", [])
    problems = [
        Problem(rule="option", says=f"no option {', '.join(options)}", mend=mend, settings=settings[mend])
        for mend, options in mends.items()
    ]
    if without and problems:
        problems.append(nothing_means(without))
    elif without:
        problems.append(Problem(rule="option", says=f"no option {', '.join(without)}", mend=suggest_name(without[0], known)))
    return problems


def _unknown_options(argv: Sequence[str], known: Collection[str]) -> Iterator[str]:
    """Yield the names of the long options of a command line that are not known."""
    for argument in argv:
        option = argument.partition("=")[0]
        if re.fullmatch(r"--[A-Za-z][\w.-]*", option) and option not in known:
            yield option


def _missing_argument_problem(parameter: Any, context: Any) -> Problem:
    """Return the problem of a verb without one of its arguments."""
    name = _shown_name(parameter)
    wanted = " ".join(_shown_name(row) for row in context.command.params if not row.opts[0].startswith("-"))
    runs = "; `distrain ls runs` lists the runs" if name == "RUN_DIR" else ""
    return Problem(rule="option", says=f"{name} is missing", mend=f"write `{context.command_path} {wanted}`{runs}")


def _shown_name(argument: Any) -> str:
    """Return an argument's name as help shows it."""
    return str(argument.metavar or argument.name.upper()).removesuffix(" ...")


def key_instead_of_option(key: str, value: str) -> Problem | None:
    """Return the problem of an option that names a key, or its last part, of ours or of another trainer, with what to write; None if it
    names none."""
    if row := synonyms.find_synonym(key):
        flag = "true" if "true" in (row.values or {}) else None
        return synonyms.synonym_problem(key, value or flag)
    keys = config_keys()
    if key == "conf" or key in keys or key in config_files.groups(None):
        return write_instead(key, key, value, ", without dashes")
    same = [each for each in keys if each.rpartition(".")[2] == key.replace("-", "_").rpartition(".")[2]]
    if len(same) == 1:
        return write_instead(key, same[0], value)
    return unknown_key_problem(key, keys, value) if same or "." in key else None


def _option_value(option: str, argv: Sequence[str]) -> str:
    """Return the value of an option, after an equals sign or as the next argument; "" if there is none."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
        if argument == option:
            return following if not following.startswith("-") and "=" not in following else ""
    return ""
