"""Verbs and options that other programs have, or that stand in another place, and what to type here."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence

from ...trainer.spec.problem import Problem, suggest_name

# Words of other programs for what a verb does here.
# fmt: off
VERB_WORDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("train", "pretrain", "finetune", "run", "launch", "start", "resume", "continue", "submit"),
        "distrain fit conf=NAME, which trains, and goes on from the newest checkpoint of its run folder",
    ),
    **dict.fromkeys(("sweep", "multirun", "tune"), "distrain fit -m conf=NAME KEY=A,B, or `plan -m`"),
    **dict.fromkeys(("estimate", "memory", "validate", "check", "lint", "dryrun", "dry-run"), "distrain plan conf=NAME"),
    **dict.fromkeys(("init", "new", "create"), "distrain cp quickstart mine.yaml"),
    **dict.fromkeys(("config", "print", "cat"), "distrain show conf=NAME"),
    **dict.fromkeys(("status", "log", "logs", "history"), "distrain report RUN_DIR ..."),
    **dict.fromkeys(("compare", "diff"), "distrain plan -m conf=A,B for plans, distrain report RUN_DIR RUN_DIR for runs"),
    **dict.fromkeys(("average", "average_checkpoints"), "distrain export RUN_DIR DEST --average N"),
    **dict.fromkeys(("tensorboard", "wandb"), "distrain fit conf=NAME log.sinks=[console,jsonl,{word}]"),
    **dict.fromkeys(("test", "eval", "perplexity"), "distrain evaluate RUN_DIR"),
    **dict.fromkeys(("convert", "save", "push", "merge"), "distrain export RUN_DIR DEST"),
    **dict.fromkeys(("sample", "chat", "infer", "inference", "predict"), "distrain generate RUN_DIR"),
    **dict.fromkeys(("bench", "benchmark", "measure"), "distrain calibrate"),
    "profile": "distrain fit conf=NAME log.profile=[FIRST_STEP,LAST_STEP]",
    "list": "distrain ls",
    **dict.fromkeys(("env", "diagnose", "debug"), "distrain doctor conf=NAME"),
    "version": "distrain --version",
    "completion": "distrain --install-completion",
}
# fmt: on


def verb_problem(argv: Sequence[str], verbs: Collection[str]) -> Problem:
    """Return the problem of a command line whose first argument is no verb."""
    word, *rest = argv
    if "=" in word:
        return Problem(rule="verb", says=f"{word} comes after a verb", mend=f"distrain plan {shlex.join(argv)}")
    if word == "help":
        verb = rest[0] if rest and rest[0] in verbs else ""
        return Problem(rule="verb", says="no verb help", mend=f"write distrain {verb} --help".replace("  ", " "))
    if word in VERB_WORDS:
        return Problem(rule="verb", says=f"no verb {word}", mend=f"write {VERB_WORDS[word].format(word=word)}")
    return Problem(rule="verb", says=f"no verb {word}", mend=suggest_name(word, verbs))


def early_option(option: str, argv: Sequence[str], options_of_verbs: Mapping[str, Collection[str]]) -> str:
    """Return what to write for an option that stands before the verb; "" if the verb that follows has no such option."""
    at = next((number for number, word in enumerate(argv) if word in options_of_verbs), None)
    if at is None or option.partition("=")[0] not in options_of_verbs[argv[at]]:
        return ""
    return f"write it after the verb, as distrain {argv[at]} {shlex.join([*argv[at + 1 :], *argv[:at]])}"
