"""The command `distrain`: the table of its verbs, and how a command line is run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .pages.printing import print_output
from .verbs.calibrate import calibrate
from .verbs.cp import cp
from .verbs.doctor import doctor
from .verbs.evaluate import evaluate
from .verbs.exit_status import WRONG_ARGUMENTS, exit_with, status_of
from .verbs.export import export
from .verbs.fit import fit
from .verbs.generate import generate
from .verbs.ls import ls
from .verbs.plan import plan
from .verbs.prove import prove
from .verbs.report import report
from .verbs.search import search
from .verbs.show import show
from .verbs.simulate import simulate


class VerbGroup(TyperGroup):
    """The verbs as a click group: an unknown verb is one line on stderr, and Ctrl-C an exit status."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs in the order of VERBS."""
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:
        """Return what the verb returns; typer would answer a Ctrl-C with an empty line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb that the first argument names; raises Unreadable where there is none."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            from ..trainer.spec.problem import Unreadable
            from .arguments.verb_words import verb_problem

            raise Unreadable([verb_problem(args, self.commands)])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=VerbGroup, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.callback(invoke_without_command=True)
def _no_verb(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Plan and train large models from one declarative recipe.

    \b
    distrain ls                              recipes and config groups
    distrain plan conf=gpt3_175b             memory, traffic, step time, days
    distrain plan conf=gpt3_175b cluster=6x8x64 model=megatron_1t
    distrain fit conf=quickstart             train, on two CPU processes
    distrain report runs/quickstart          planned against measured
    """
    if version:
        from .keys.config_files import distrain_version

        raise typer.Exit(print_output(f"distrain {distrain_version()}"))
    if context.invoked_subcommand is None:
        print_output(context.get_help())
        raise typer.Exit(WRONG_ARGUMENTS)


# Each verb, in the order in which a newcomer needs them, with its line in `distrain --help`.
VERBS: tuple[tuple[Callable[..., int], str], ...] = (
    (ls, "List recipes, config groups, keys, runs."),
    (cp, "Copy a recipe to a file to edit, with its comments."),
    (show, "Print the composed config as YAML."),
    (plan, "Plan a run: memory, traffic, time, days."),
    (search, "Find the best layout of a model on a cluster."),
    (simulate, "Simulate one step: its timeline, its critical path, what if."),
    (fit, "Plan, launch, train, log, resume."),
    (prove, "Compare training curves across layouts."),
    (report, "Show a run: planned against measured, and its curve."),
    (evaluate, "Print the loss of a run's newest checkpoint on any data."),
    (export, "Write a run's newest checkpoint as a Hugging Face folder."),
    (generate, "Generate text from a run's newest checkpoint."),
    (calibrate, "Measure this machine or hosts, write a device and a cluster."),
    (doctor, "Check what this machine has and lacks for a run."),
)
for _verb, _short_help in VERBS:
    app.command(short_help=_short_help)(_verb)


def main() -> None:
    """Run the command line of this process and exit with its status."""
    exit_with(command)


def command(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status."""
    completing = os.environ.get("_DISTRAIN_COMPLETE", "")
    if completing.startswith("complete_"):
        from .completion import completions

        return status_of(lambda: print_output(completions(completing.removeprefix("complete_"), os.environ)))
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    return status_of(lambda: _click_command()(args=list(argv), prog_name="distrain", standalone_mode=False), argv)


@cache
def _click_command() -> Any:
    """Make the click command of all verbs; typer would make it again for every command line of a process."""
    return typer.main.get_command(app)
