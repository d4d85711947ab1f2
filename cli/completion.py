"""Shell completion: the verbs, options, recipes, groups and keys that can complete a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from ..trainer.system.regular_file import expand_home
from .keys import config_files

OPTIONS = {
    "ls": ("--json", "--config-dir", "--help"),
    "cp": ("--config-dir", "--help"),
    "show": ("--launch", "--engine", "--comments", "--config-dir", "--help"),
    "plan": ("--json", "-m", "--operators", "--html", "--config-dir", "--help"),
    "search": ("--json", "--all", "-o", "--config-dir", "--help"),
    "simulate": ("--json", "--svg", "--trace", "--slow", "--config-dir", "--help"),
    "fit": ("-m", "--config-dir", "--help"),
    "prove": ("--json", "--reasons", "--config-dir", "--help"),
    "report": ("--json", "--html", "--timeline", "--svg", "--trace", "--help"),
    "evaluate": ("--step", "--sequences", "--ema", "--json", "--help"),
    "export": ("--dtype", "--step", "--average", "--ema", "--adapter", "--help"),
    "generate": ("--prompt", "--tokens", "--temperature", "--top-k", "--chat", "--step", "--ema", "--seed", "--tokenizer", "--help"),
    "calibrate": ("-o", "--name", "--devices", "--force", "--json", "--config-dir", "--help"),
    "doctor": ("--config-dir", "--help"),
}

PATH_OPTIONS = ("--config-dir", "--html")  # options whose values the shell completes itself
CHOICES = {"--dtype": ("fp32", "bf16", "fp16")}
FOLDER_VERBS = ("report", "evaluate", "export", "generate")  # verbs that take folders, which the shell completes itself


def completions(shell: str, environment: Mapping[str, str]) -> str:
    """The completions of the command line in the environment, in the form that the shell's completion script reads."""
    if shell == "bash":
        words = environment.get("COMP_WORDS", "").split("\n")
        position = environment.get("COMP_CWORD", "")
        at = int(position) if position.isascii() and position.isdecimal() and len(position) < 10 else 0
        before, word = _join_bash_words(words[1 : at + 1] if at < len(words) else [*words[1:], ""])
        found = candidates(before, word)
        if len(found) == 1 and _goes_on(found[0]):  # bash would end it with a space; after two that begin alike it adds none
            found.append(f"{found[0]}VALUE")
        return "\n".join(each[_kept_length(word) :] for each in found)
    typed = environment.get("_TYPER_COMPLETE_ARGS", "")
    words = typed.split()[1:]
    word = words.pop() if words and not typed.endswith(" ") else ""
    found = candidates(words, word)
    if shell == "zsh":
        return "\n".join(_compadd(found)) or "_files"
    return "\n".join(f"{each}::: " for each in found) if shell in ("powershell", "pwsh") else "\n".join(found)


def candidates(before: Sequence[str], word: str) -> list[str]:
    """The words that complete `word`, after the words before it."""
    if not before:
        return _with_prefix(word, [*OPTIONS, "--help", "--version"])
    verb, config_dir = before[0], _typed_config_dir(before)
    if verb not in OPTIONS or before[-1] in PATH_OPTIONS:
        return []
    if word.startswith("-"):
        return _with_prefix(word, OPTIONS[verb])
    if verb in FOLDER_VERBS:
        return _with_prefix(word, CHOICES.get(before[-1], ()))
    if verb == "ls":
        return _with_prefix(word, _ls_words(word, config_dir)) if before[-1] == "ls" else []
    if verb == "cp":
        return _with_prefix(word, _cp_words(word, config_dir)) if before[-1] == "cp" else []
    key, equals, _ = word.partition("=")
    if equals:
        return _with_prefix(word, [f"{key}={value}" for value in _values(key, config_dir)])
    conf = [] if any(each.startswith("conf=") for each in before) else [f"conf={name}" for name in config_files.recipes(config_dir)]
    found = _with_prefix(word, [*conf, *_keys(config_dir, word)]) if word or not conf else conf
    return (
        _with_prefix(word, [f"{found[0]}{value}" for value in _values(found[0][:-1], config_dir)]) or found if _is_one_key(found) else found
    )


def _ls_words(word: str, config_dir: Path | None) -> list[str]:
    """What `ls` takes: groups, the options of one once its = is typed, or keys once a dot is."""
    group, equals, _ = word.partition("=")
    if equals:
        known = (*config_files.groups(config_dir), "conf")
        return [f"{group}={value}" for value in _values(group, config_dir)] if group in known else []
    groups = [*config_files.groups(config_dir), "recipes", "runs"]
    if "." not in word:
        return groups
    from .keys.key_help import key_fields, sections

    return [*sorted(sections()), *(key for key, _, _ in key_fields())]


def _cp_words(word: str, config_dir: Path | None) -> list[str]:
    """What `cp` takes: recipes and groups, or a group's options once its slash is typed; the shell completes files itself."""
    group = word.partition("/")[0]
    if "/" in word and group in config_files.groups(config_dir):
        return [f"{group}/{option}" for option in config_files.options(group, config_dir)]
    return [*config_files.recipes(config_dir), *(f"{group}/" for group in config_files.groups(config_dir) if word)]


def _is_one_key(found: Sequence[str]) -> bool:
    return len(found) == 1 and found[0].endswith("=")


def _goes_on(word: str) -> bool:
    """Return whether the rest of a word is to be typed: a value after KEY=, an option after GROUP/. A space would split them."""
    return word.endswith(("=", "/"))


def _compadd(found: Sequence[str]) -> list[str]:
    """The commands with which zsh adds these words; -S '' adds no space after one that goes on."""
    ended, unended = ([quote(each) for each in found if _goes_on(each) is goes_on] for goes_on in (False, True))
    adding = (("compadd --", ended), ("compadd -S '' --", unended))
    return [f"{command} {' '.join(words)};" for command, words in adding if words]


def _keys(config_dir: Path | None, word: str) -> list[str]:
    groups = [f"{group}=" for group in config_files.groups(config_dir)]
    if "." not in word:
        return groups
    from .keys.keys import config_keys

    return [*groups, *(f"{key}=" for key in config_keys())]


def _values(key: str, config_dir: Path | None) -> list[str]:
    if key == "conf":
        return list(config_files.recipes(config_dir))
    if key in config_files.groups(config_dir):
        return list(config_files.options(key, config_dir))
    from .keys.keys import completion_values

    return completion_values(key)


def _with_prefix(word: str, words: Sequence[str]) -> list[str]:
    return [each for each in words if each.startswith(word)]


def _typed_config_dir(before: Sequence[str]) -> Path | None:
    """The folder after --config-dir, where one was typed and exists."""
    for flag, value in zip(before, [*before[1:], ""], strict=True):
        found = value if flag == "--config-dir" else flag.partition("=")[2] if flag.startswith("--config-dir=") else ""
        if found and expand_home(found).is_dir():
            return Path(found)
    return None


def _join_bash_words(words: Sequence[str]) -> tuple[list[str], str]:
    """Join the words that bash broke at = and :, such as conf=gpt2; return those before the cursor and the one at it."""
    joined: list[str] = []
    glue = False
    for word in words:
        breaks = word in ("=", ":")
        if joined and (breaks or glue):
            joined[-1] += word
        else:
            joined.append(word)
        glue = breaks
    return joined[:-1], joined[-1] if joined else ""


def _kept_length(word: str) -> int:
    """The characters of a word that bash keeps: up to its last = or :."""
    return max(word.rfind("="), word.rfind(":")) + 1
