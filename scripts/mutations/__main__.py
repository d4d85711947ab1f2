"""Plants errors in the mathematics of training, or of plans, one at a time, and checks that `prove` or a test finds each.

Run `python -m distrain.scripts.mutations [files=training|plan] [path=PATTERN ...] [seed=1] [count=100] [copies=2] [KIND ...]
[--json FILE [--resume]]` in a checkout, on Linux. With path=trainer/layers/* errors are drawn in files of that pattern only. The kinds
are arithmetic, comparison, constant and reduction, of training also dim, group and sign, of plans also axis, term and rounding; without
any, all, at least ten of each in a hundred. The file is rewritten after each mutation; with --resume, those of which it says what found
them are not tried again.

A mutation names its function and the expression that it replaces. Each is planted in a copy of the checkout, in a temporary folder: first,
of training, `prove conf=tiny_full` runs there, up to the first layout that does not train the same curve, then the quick tests that run its
line and the slow ones of its rooms, up to the first that fails. One that nothing finds has survived, unless
equivalents.json says why it changes nothing. A layout or a test that does not run a mutation's line is left out: the lines of each
are recorded once for each state of the checkout, and kept in the user's cache folder.

Exit status: 0 nothing survived; 1 a mutation survived; 2 the arguments are wrong; 130 Ctrl-C, which prints the table of what was tried.
"""

from __future__ import annotations

import fnmatch
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
from .mutated_files import FILE_LISTS, FileList, files_to_mutate
from .recorded_tests import read_recorded_tests
from .results import read_found, write_results
from .sites import Mutation, all_mutations, draw


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The command line."""

    seed: int = 1
    count: int = 100
    copies: int = 2
    files: str = "training"
    paths: tuple[str, ...] = ()  # patterns of files, from the checkout's root; (): all
    kinds: tuple[str, ...]
    json: Path | None = None
    resume: bool = False


def main() -> int:
    """Try the mutations that a seed draws, and print a line for each and a table."""
    try:
        arguments = read_arguments(sys.argv[1:])
        files = FILE_LISTS[arguments.files]
        resumed = read_found(arguments.json, arguments.seed, arguments.files) if arguments.json and arguments.resume else ()
        found = {each.mutation.name: each for each in resumed}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mutations = mutations_in(all_mutations(ROOT, files), arguments.paths)
    drawn = draw(mutations, arguments.seed, arguments.count, arguments.kinds)
    tried = [found[each.name] for each in drawn if each.name in found]
    others = [found[name] for name in found.keys() - {each.name for each in drawn}]  # of other kinds, files or counts

    def add(result: TriedMutation) -> None:
        tried.append(result)
        show(progress_line(result, len(tried), len(drawn)))
        if arguments.json:
            write_results(arguments.json, arguments.seed, [*others, *tried], arguments.files)

    try:
        try_all([each for each in drawn if each.name not in found], arguments.copies, arguments.files, add)
    except KeyboardInterrupt:
        print(f"stopped after {len(tried)} of {len(drawn)}", table(tried, files), sep="\n")
        return 130
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(tried, files))
    return 1 if any(each.verdict == "survived" for each in tried) else 0


def read_arguments(words: Sequence[str]) -> Draw:
    """Read the command line; raises ValueError."""
    rest, numbers, named, file, resume, files, paths = list(words), dict[str, int](), list[str](), None, False, "training", list[str]()
    while rest:
        word = rest.pop(0)
        key, _, value = word.partition("=")
        if word == "--json" and rest:
            file = Path(rest.pop(0))
        elif word == "--resume":
            resume = True
        elif key in ("seed", "count", "copies") and value.isdigit():
            numbers[key] = int(value)
        elif key == "files" and value in FILE_LISTS:
            files = value
        elif key == "path" and value:
            paths.append(value)
        else:
            named.append(word)
    kinds = tuple(FILE_LISTS[files].kinds)
    if wrong := [word for word in named if word not in kinds]:
        known = f"files={'|'.join(FILE_LISTS)}, seed=N, count=N, copies=N, path=PATTERN, --json FILE, --resume"
        raise ValueError(f"{wrong[0]} is neither {known} nor one of {', '.join(kinds)}")
    if resume and not file:
        raise ValueError("--resume goes on from a file: --json FILE --resume")
    known_paths = [path.relative_to(ROOT).as_posix() for path in files_to_mutate(ROOT, FILE_LISTS[files])]
    if wrong := [each for each in paths if not fnmatch.filter(known_paths, each)]:
        raise ValueError(f"path={wrong[0]} names none of the files of files={files}")
    return Draw(**numbers, files=files, paths=tuple(paths), kinds=tuple(named) or kinds, json=file, resume=resume)


def mutations_in(mutations: Sequence[Mutation], paths: Sequence[str]) -> list[Mutation]:
    """Return the mutations in files of one of these patterns, in which * is also any folders; all without patterns."""
    return [each for each in mutations if not paths or any(fnmatch.fnmatch(each.path, pattern) for pattern in paths)]


def show(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def try_all(mutations: Sequence[Mutation], copies: int, name: str, add: Callable[[TriedMutation], None]) -> None:
    """Try mutations of the list of files of this name, as many at a time as there are copies of the checkout, and `add` each, one at a
    time; everything that was started has ended afterwards."""
    equivalents, lock, files = read_equivalents(), Lock(), FILE_LISTS[name]
    with TemporaryDirectory(prefix="mutations.") as folder, ExitStack() as at_end:
        made = [at_end.enter_context(Copy(Path(folder) / str(number))) for number in range(copies)]
        executed = read_executed_lines(made[0], show) if files.is_proved else None
        tests = read_recorded_tests(made, cache_folder(), state_digest(files=files), show, name)
        campaigns = {copy: MutationCampaign(copy, executed, tests, equivalents, files) for copy in made}

        def try_one(copy: Copy, mutation: Mutation) -> None:
            result = campaigns[copy].try_mutation(mutation)
            with lock:
                add(result)

        run_on_copies(made, mutations, try_one)


def progress_line(tried: TriedMutation, number: int, count: int) -> str:
    """A mutation and its verdict in a line or two."""
    mutation = tried.mutation
    return f"{number}/{count} {tried.verdict} {tried.seconds:.0f} s: {mutation.kind}: {mutation.name[:200]}\n    {tried.says[:160]}"


def table(tried: Sequence[TriedMutation], files: FileList) -> str:
    """The counts by kind, and the mutations that survived, as Markdown."""
    rows = ["| kind | drawn | found by prove | found by tests | equivalent | survived |", "|---|---|---|---|---|---|"]
    for kind in (*files.kinds, "all"):
        rows.append(f"| {kind} | {' | '.join(map(str, counts(tried, kind).values()))} |")
    survivors = [f"- {each.mutation.kind}: `{each.mutation.name}`" for each in tried if each.verdict == "survived"]
    total = sum(each.seconds for each in tried)
    closing = f"{total / max(1, len(tried)):.0f} s a mutation on average"
    return "\n".join([*rows, "", closing, *(["", "Survived:", *survivors] if survivors else [])])


if __name__ == "__main__":
    show_help(__doc__)
    raise SystemExit(main())
