"""Plants errors in the mathematics of training, one at a time, and checks that `prove` or a test finds each.

Run `python -m distrain.scripts.mutations [seed=1] [count=100] [copies=2] [KIND ...] [--json FILE [--resume]]` in a checkout, on Linux. The
kinds are arithmetic, comparison, constant, reduction, dim, group and sign; without any, all, at least ten of each in a hundred. The file is
rewritten after each mutation; with --resume, those of which it says what found them are not tried again.

A mutation names its function and the expression that it replaces. Each is planted in a copy of the checkout, in a temporary folder: first
`prove conf=tiny_full` runs there, up to the first layout that does not train the same curve, then the quick tests that run its
line and the slow ones of its rooms, up to the first that fails. One that nothing finds has survived, unless
equivalents.json says why it changes nothing. A layout or a test that does not run a mutation's line is left out: the lines of each
are recorded once for each state of the checkout, and kept in the user's cache folder.

Exit status: 0 nothing survived; 1 a mutation survived; 2 the arguments are wrong; 130 Ctrl-C, which prints the table of what was tried.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

from ..show_help import show_help
from .campaign import MutationCampaign, TriedMutation, cache_folder, counts, read_executed_lines, state_digest
from .copies import ROOT, Copy, run_on_copies
from .equivalents import read_equivalents
from .kinds import KINDS
from .recorded_tests import read_recorded_tests
from .results import read_found, write_results
from .sites import Mutation, all_mutations, draw


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The command line."""

    seed: int = 1
    count: int = 100
    copies: int = 2
    kinds: tuple[str, ...] = tuple(KINDS)
    json: Path | None = None
    resume: bool = False


def main() -> int:
    """Try the mutations that a seed draws, and print a line for each and a table."""
    try:
        arguments = read_arguments(sys.argv[1:])
        resumed = read_found(arguments.json, arguments.seed) if arguments.json and arguments.resume else ()
        found = {each.mutation.name: each for each in resumed}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    drawn = draw(all_mutations(ROOT), arguments.seed, arguments.count, arguments.kinds)
    tried = [found[each.name] for each in drawn if each.name in found]

    def add(result: TriedMutation) -> None:
        tried.append(result)
        show(progress_line(result, len(tried), len(drawn)))
        if arguments.json:
            write_results(arguments.json, arguments.seed, tried)

    try:
        try_all([each for each in drawn if each.name not in found], arguments.copies, add)
    except KeyboardInterrupt:
        print(f"stopped after {len(tried)} of {len(drawn)}", table(tried), sep="\n")
        return 130
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(tried))
    return 1 if any(each.verdict == "survived" for each in tried) else 0


def read_arguments(words: Sequence[str]) -> Draw:
    """Read the command line; raises ValueError."""
    rest, numbers, kinds, file, resume = list(words), dict[str, int](), list[str](), None, False
    while rest:
        word = rest.pop(0)
        key, _, value = word.partition("=")
        if word == "--json" and rest:
            file = Path(rest.pop(0))
        elif word == "--resume":
            resume = True
        elif key in ("seed", "count", "copies") and value.isdigit():
            numbers[key] = int(value)
        elif word in KINDS:
            kinds.append(word)
        else:
            raise ValueError(f"{word} is neither seed=N, count=N, copies=N, --json FILE, --resume nor one of {', '.join(KINDS)}")
    if resume and not file:
        raise ValueError("--resume goes on from a file: --json FILE --resume")
    return Draw(**numbers, kinds=tuple(kinds) or tuple(KINDS), json=file, resume=resume)


def show(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def try_all(mutations: Sequence[Mutation], copies: int, add: Callable[[TriedMutation], None]) -> None:
    """Try mutations, as many at a time as there are copies of the checkout, and `add` each, one at a time; everything that was started has
    ended afterwards."""
    equivalents, lock = read_equivalents(), Lock()
    with TemporaryDirectory(prefix="mutations.") as folder, ExitStack() as at_end:
        made = [at_end.enter_context(Copy(Path(folder) / str(number))) for number in range(copies)]
        executed = read_executed_lines(made[0], show)
        tests = read_recorded_tests(made, cache_folder(), state_digest(), show)
        campaigns = {copy: MutationCampaign(copy, executed, tests, equivalents) for copy in made}

        def try_one(copy: Copy, mutation: Mutation) -> None:
            result = campaigns[copy].try_mutation(mutation)
            with lock:
                add(result)

        run_on_copies(made, mutations, try_one)


def progress_line(tried: TriedMutation, number: int, count: int) -> str:
    """A mutation and its verdict in a line or two."""
    mutation = tried.mutation
    return f"{number}/{count} {tried.verdict} {tried.seconds:.0f} s: {mutation.kind}: {mutation.name[:200]}\n    {tried.says[:160]}"


def table(tried: Sequence[TriedMutation]) -> str:
    """The counts by kind, and the mutations that survived, as Markdown."""
    rows = ["| kind | drawn | found by prove | found by tests | equivalent | survived |", "|---|---|---|---|---|---|"]
    for kind in (*KINDS, "all"):
        rows.append(f"| {kind} | {' | '.join(map(str, counts(tried, kind).values()))} |")
    survivors = [f"- {each.mutation.kind}: `{each.mutation.name}`" for each in tried if each.verdict == "survived"]
    total = sum(each.seconds for each in tried)
    closing = f"{total / max(1, len(tried)):.0f} s a mutation on average"
    return "\n".join([*rows, "", closing, *(["", "Survived:", *survivors] if survivors else [])])


if __name__ == "__main__":
    show_help(__doc__)
    raise SystemExit(main())
