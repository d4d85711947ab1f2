"""The command `distrain`: its verbs, what they print and the status they leave."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .entry import CANNOT, FINE, WRONG_WORDS, exit_with, status_of
from .pages.console import say as _say
from .pages.console import tell_problems
from .verbs.cp import cp
from .verbs.doctor import doctor
from .verbs.export import export
from .verbs.generate import generate
from .verbs.ls import ls
from .verbs.report import report

if TYPE_CHECKING:
    from ..trainer.plan.result import Plan


class Verbs(TyperGroup):
    """The table of verbs, which answers a wrong one in one line."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order in which a newcomer meets them."""
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:
        """What the verb returns; typer would answer a Ctrl-C with an empty line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that a word names."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            from ..trainer.spec.problem import Problem, Unreadable, nearest

            if "=" in args[0]:
                raise Unreadable([Problem(rule="verb", says=f"{args[0]} comes after a verb", mend=f"distrain plan {' '.join(args)}")])
            raise Unreadable([Problem(rule="verb", says=f"no verb {args[0]}", mend=nearest(args[0], self.commands))])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Verbs, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)

Words = Annotated[list[str] | None, typer.Argument(metavar="conf=NAME [KEY=VALUE ...]", show_default=False)]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        metavar="DIR",
        help="Your own groups (DIR/model/mine.yaml) and recipes (DIR/mine.yaml); they win over built-in ones.",
    ),
]


def main() -> None:
    """The entry point: run the command line and exit with its status."""
    exit_with(command)


def command(argv: Sequence[str]) -> int:
    """Run one command line; its exit status."""
    asked = os.environ.get("_DISTRAIN_COMPLETE", "")
    if asked.startswith("complete_"):
        from .completion import answer

        return status_of(lambda: _say(answer(asked.removeprefix("complete_"), os.environ)))
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    return status_of(lambda: app(args=list(argv), prog_name="distrain", standalone_mode=False), argv)


@app.callback(invoke_without_command=True)
def _verbs(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Plan the training of large models from one declarative file.

    \b
    distrain ls                              what there is
    distrain show conf=gpt3_175b             a recipe, composed
    distrain plan conf=gpt3_175b             its memory, traffic, time, days
    distrain plan conf=gpt3_175b cluster=6x8x64 model=megatron_1t
    """
    if version:
        from .config.library import own_version

        raise typer.Exit(_say(f"distrain {own_version()}"))
    if context.invoked_subcommand is None:
        _say(context.get_help())
        raise typer.Exit(WRONG_WORDS)


app.command(short_help="What there is: recipes, config groups, keys, runs.")(ls)
app.command(short_help="A recipe as a file to edit, with its comments.")(cp)


@app.command(short_help="The composed config, as YAML.")
def show(
    words: Words = None,
    launch: Annotated[
        bool, typer.Option("--launch", help="The command and the files that `fit` starts it with, as a shell script.")
    ] = False,
    engine: Annotated[bool, typer.Option("--engine", help="What DeepSpeed is told, as JSON.")] = False,
    comments: Annotated[bool, typer.Option("--comments", help="Beside each key what it is, its choices and its unit.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Print the composed config, every default filled in, as YAML that conf=FILE reads back. Nothing is run or written.

    \b
    distrain show conf=gpt3_175b parallel.tp=4 > mine.yaml
    distrain show conf=gpt3_175b --comments
    distrain show conf=gpt3_175b launch=slurm --launch
    distrain show conf=quickstart --engine
    """
    from msgspec import to_builtins

    from ..trainer.spec.problem import Problem, Unreadable

    conf, overrides = _words(words, "show", config_dir)
    from .config.load import as_yaml, compose, load, read

    if launch and engine:
        raise Unreadable([Problem(rule="option", says="--launch and --engine print two things", mend="give one of them")])
    if launch or engine:
        from ..trainer.launch.resolve import shown

        run = load(conf, overrides, config_dir)
        _say("\n".join(shown(run, launch=launch, engine=engine)))
        if launch:
            from ..trainer.launch.resolve import would_refuse

            tell_problems(would_refuse(run))
        return FINE
    composed = to_builtins(read(compose(conf, overrides, config_dir)))
    text = as_yaml({key: value for key, value in composed.items() if value is not None})
    if comments:
        from .config import key_help, yaml_text

        text = yaml_text.commented(text, key_help.comments())
    return _say(text.rstrip())


@app.command(short_help="What a run costs: memory, traffic, time, days.")
def plan(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the page (with -m, a list).")] = False,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Plan every combination of values that are listed: parallel.tp=1,2,4.")
    ] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Say what a run costs: memory on each GPU, bytes on each link, the step time, the days.

    Exit status: 0 it fits (with -m, all do); 1 it doesn't fit or can't run; 2 the words are wrong.

    \b
    distrain plan conf=gpt3_175b
    distrain plan conf=gpt3_175b cluster=384x8 parallel.zero=1 device=h100_80g
    distrain plan conf=gpt3_175b -m parallel.tp=4,8 parallel.pp=8,16
    """
    conf, overrides = _words(words, "plan", config_dir)
    from .config import load

    swept = load.sweep(conf, overrides, config_dir) if multirun else None
    runs = [each.run for each in swept] if swept is not None else [load.load(conf, overrides, config_dir)]
    from ..trainer.launch.admission import FileChecks, with_files
    from ..trainer.plan.plan import make_plan

    checks = FileChecks()
    plans = [with_files(run, make_plan(run), checks.look(run)) for run in runs]
    if as_json:
        _say(_json(plans, [each.words for each in swept] if swept is not None else None))
    elif swept is not None:
        _say_sweep(plans, [each.words for each in swept])
    else:
        _say_page(plans[0])
    if swept is None and not _one_stream():
        tell_problems(plans[0].problems)
    if swept is not None and not any(each.words for each in swept):
        tell_problems([load.nothing_swept()])
    return FINE if all(each.ok and each.fits for each in plans) else CANNOT


@app.command(short_help="Plan, launch, train, log, resume.")
def fit(
    words: Words = None,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="Train every combination of values that are listed, one after the other.")
    ] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Plan, launch on this machine, train, log; goes on from the newest checkpoint of the run's folder.

    With -m each combination has a run folder of its own, named by its words, in which the same words go on.

    Exit status: 0 it trained (with -m, all did); 1 it can't run or failed; 2 the words are wrong; 75 it was stopped and has saved.

    \b
    distrain fit conf=quickstart
    distrain fit conf=quickstart train.steps=600 checkpoint.resume=must
    distrain fit conf=quickstart -m optim.lr=1e-3,3e-3 train.seed=1,2
    """
    conf, overrides = _words(words, "fit", config_dir)
    if multirun:
        from .verbs.fit_sweep import fit_sweep

        return fit_sweep(conf, overrides, config_dir)
    from .verbs.fit import fit as run_fit

    return run_fit(conf, overrides, config_dir)


@app.command("prove", short_help="Whether every layout that this machine can run trains the same curve.")
def prove_layouts(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")] = False,
    reasons: Annotated[bool, typer.Option("--reasons", help="Say why each layout that is left out can't run.")] = False,
    config_dir: ConfigDir = None,
) -> int:
    """Train a recipe in one process and in every layout that this machine can run: the same curve, or where it departs.

    steps=N trains so many (8, or the recipe's where it has fewer). layouts=dp2,tp2.sequence,dp2.tp2.pp2.gpipe names layouts,
    layouts=all takes all; otherwise about a dozen in which every two choices meet.

    Exit status: 0 all train the same curve; 1 one departs or can't run; 2 the words are wrong.

    \b
    distrain prove conf=tiny_2x2x2
    distrain prove conf=quickstart layouts=dp2,dp2.zero3 steps=4
    """
    from .pages.console import live
    from .verbs.prove import Screen, prove

    def show(words: str) -> None:
        live("")
        _say(words)

    screen = Screen(show=show, tell=tell_problems, live=live)
    return prove(words or (), config_dir, screen, as_json=as_json, reasons=reasons)


app.command(short_help="A run: planned against measured, and its curve.")(report)
app.command(short_help="A run's newest checkpoint as a Hugging Face folder.")(export)
app.command(short_help="Text from a run's newest checkpoint.")(generate)
app.command(short_help="What this machine has and lacks for a run.")(doctor)


def _words(words: Sequence[str] | None, verb: str, config_dir: Path | None) -> tuple[str, tuple[str, ...]]:
    """The recipe and the overrides; raises Unreadable with all that is wrong with the words."""
    from .config.arguments import read_words

    read = read_words(words or (), verb, config_dir)
    if read.problems:
        from ..trainer.spec.problem import Unreadable
        from .config.load import mistakes

        raise Unreadable([*read.problems, *mistakes(read.overrides, config_dir)])
    tell_problems(read.notes)
    return read.conf, read.overrides


def _json(plans: Sequence[Plan], layouts: Sequence[Sequence[str]] | None) -> str:
    from msgspec import json, to_builtins

    if layouts is None:
        return json.format(json.encode(plans[0])).decode()
    listed = [{"overrides": words, **to_builtins(each)} for words, each in zip(layouts, plans, strict=True)]
    return json.format(json.encode(listed)).decode()


def _say_page(plan: Plan) -> None:
    from .pages.format import look
    from .pages.plan_page import page

    _say(page(plan, look()))


def _say_sweep(plans: Sequence[Plan], layouts: Sequence[Sequence[str]]) -> None:
    from .pages.format import look
    from .pages.plan_page import rows

    _say(rows(list(zip(layouts, plans, strict=True)), look()))


def _one_stream() -> bool:
    """Whether stdout and stderr end in the same place, so that the page there has told the problems already."""
    try:
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno()))
    except (OSError, ValueError, AttributeError):
        return False
