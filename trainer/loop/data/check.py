"""All that can be known of data before it is read: its words, files and tokenizer, with every problem found at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from ...spec.problem import Problem, Unreadable
from ...spec.run import Data
from . import columnar
from .data_error import refused, wrong
from .find import File, Remark, Search, found, library
from .formats import JSON_AS_TEXT, Fault, faults, form, is_lines, json_in_text, problem_of, text_suffixes
from .sources import HELD_OUT
from .token_files import DATATROVE, TokenFile, opened
from .tokenizer import Bytes, Tokenizer, tokenizer

Got = TypeVar("Got")

TEXT = Search(
    suffixes=text_suffixes(),
    beside=("dataset_info.json", "dataset_dict.json", "state.json"),
    words=".txt, .jsonl, .json, .ndjson (or one of them as .gz or .zst), .parquet or .arrow",
    mend="name files of other kinds by a pattern: data.path='{}/**/*.md'",
)
TOKENS = Search(
    suffixes=(".bin", ".npy", DATATROVE),
    beside=(".idx", *(f"{DATATROVE}.{each}" for each in ("index", "metadata", "loss"))),
    words=".bin, .npy or .ds",
    mend="",
)
LIBRARIES = {".zst": "zstandard", "parquet": "pyarrow", "arrow": "pyarrow"}  # what reads a kind of file
TESTS = {"test", "eval", "dev"}  # words of the names of files that their writer held out, beside those of validation
_TABLES_LOOKED_INTO = 64
_PADDED = 1.2  # times a tokenizer's ids, and 1024 more: a model's vocabulary with its padding


@dataclass(frozen=True, kw_only=True)
class CheckedData:
    """The files of each source, opened where they are of tokens, and the tokenizer of those of text."""

    groups: list[list[File]]
    opened: list[list[TokenFile]]
    tokenizer: Tokenizer | None


def check(data: Data, vocab: int, remark: Remark) -> CheckedData:
    """What there is to read; raises Unreadable with all that is wrong with the words, the files and the tokenizer."""
    problems = _word_problems(data)
    by, groups, read = None, list[list[File]](), list[list[TokenFile]]()
    if data.name in ("text", "stdlib"):
        by = _try(problems, lambda: _tokenizer(data, vocab, remark))
    if data.name == "stdlib":
        groups = _try(problems, lambda: [library()]) or []
    elif data.name in ("text", "tokens") and paths_of(data):
        groups = _groups(data, remark, problems)
    files = [file for group in groups for file in group]
    if data.name == "text":
        problems += _text_problems(files, data.text_key)
        _remark_on_json(files, remark)
        _remark_on_names(files, HELD_OUT | TESTS, remark)
    elif data.name == "tokens":
        read = _open_token_files(data, vocab, groups, problems, remark)
        _remark_on_names(files, TESTS, remark)
        if data.end is not None and data.end >= vocab:
            problems.append(wrong(f"data.end={data.end} is not in the vocabulary, model.vocab={vocab}", f"its ids end at {vocab - 1}"))
    if problems:
        raise Unreadable(problems)
    return CheckedData(groups=groups, opened=read, tokenizer=by)


def _try(problems: list[Problem], act: Callable[[], Got]) -> Got | None:
    """The value of a call, or None if it raises Unreadable; adds to problems."""
    try:
        return act()
    except Unreadable as error:
        problems += error.problems
        return None


def _word_problems(data: Data) -> list[Problem]:
    """A path that is missing or idle, and weights that are not one a path."""
    reads, paths, problems = data.name in ("text", "tokens"), paths_of(data), []
    if reads and not paths:
        problems.append(wrong(f"data={data.name} reads files, and data.path is not set", "set data.path=FILE, a folder or a pattern"))
    if paths and not reads:
        problems.append(wrong(f"data.path={paths[0]} is not read by data={data.name}", "set data=text or data=tokens, or data.path=null"))
    if data.weights and len(data.weights) != len(paths):
        problems.append(wrong(f"data.weights has {len(data.weights)} for {len(paths)} paths", "give each path of data.path a weight"))
    return problems


def paths_of(data: Data) -> tuple[str, ...]:
    """`data.path` as several."""
    return (data.path,) if isinstance(data.path, str) else data.path or ()


def _groups(data: Data, remark: Remark, problems: list[Problem]) -> list[list[File]]:
    """The files of each source: of each path where they have weights, of all paths where they have none; adds to problems."""
    search = TOKENS if data.name == "tokens" else TEXT._replace(takes=lambda path: _is_text_of(path, data.text_key))
    groups = found(paths_of(data), search, remark, problems)
    return groups if data.weights else [[file for files in groups for file in files]]


def _is_text_of(path: Path, key: str) -> bool:
    """Whether a file of a folder is text, which a .json may be or not."""
    return path.suffix.lower() != ".json" or is_lines(path, key)


def _tokenizer(data: Data, vocab: int, remark: Remark) -> Tokenizer:
    by = tokenizer(data.tokenizer, data.end)
    if not isinstance(by, Bytes) and by.size > vocab:
        says = f"data.tokenizer={data.tokenizer} has ids up to {by.size - 1}, and model.vocab={vocab}"
        raise refused(says, f"set model.vocab={by.size}")
    if vocab > _PADDED * by.size + 1024:
        remark(f"data.tokenizer={data.tokenizer} has {by.size:,} ids, and model.vocab={vocab}: the others are never seen")
    if by.end is None:
        remark(f"data.tokenizer={data.tokenizer} names no token that ends a document, and documents run together: data.end=ID sets one")
    return by


def _text_problems(files: Sequence[File], key: str) -> list[Problem]:
    """Files that can't be read, libraries that are missing, tables without the column."""
    problems, needed = faults(files, "text"), dict[str, str]()
    for file in files:
        for kind in form(file.path.name):
            needed.setdefault(LIBRARIES.get(kind, ""), str(file.path))
    missing = [name for name in needed if name and find_spec(name) is None]
    for name in missing:
        problems.append(wrong(f"{needed[name]} wants {name}, which is not installed", "pip install 'distrain[data]'"))
    if problems:
        return problems
    columns: dict[Fault, list[File]] = {}
    for file in [file for file in files if form(file.path.name)[0] in ("parquet", "arrow")][:_TABLES_LOOKED_INTO]:
        try:
            columnar.check(str(file.path), form(file.path.name)[0], key)  # type: ignore[arg-type]
        except columnar.UnreadableTable as error:
            columns.setdefault(Fault(error.says, error.mend), []).append(file)
    return [problem_of(fault, files, verb="") for fault, files in columns.items()]


def _open_token_files(
    data: Data, vocab: int, groups: Iterable[Sequence[File]], problems: list[Problem], remark: Remark
) -> list[list[TokenFile]]:
    """The files of each source; adds what is wrong with them, and what does not say where documents end where that is asked."""
    read: list[list[TokenFile]] = []
    kinds: dict[tuple[str, str], list[Problem]] = {}
    for group in groups:
        read.append([])
        for file in group:
            try:
                read[-1].append(opened(file, vocab))
            except Unreadable as error:
                kinds.setdefault(_kind_of(error.problems[0], file), []).extend(error.problems)
            except OSError as error:
                problems.append(wrong(f"{file.path}: {error.strerror or error}"))
    for same in kinds.values():
        more = f" (and {len(same) - 1:,} more)" if same[1:] else ""
        problems.append(wrong(same[0].says + more, same[0].mend))
    files = [each for group in read for each in group]
    unbounded = next((each.file.path for each in files if each.bounds is None), None)
    if data.documents and data.end is None and unbounded:
        says = f"data.documents=true, and {unbounded} does not say where documents end"
        problems.append(wrong(says, "set data.end to the token id that ends one (GPT-2: 50256)"))
    _remark_on_types(files, remark)
    return read


def _kind_of(problem: Problem, file: File) -> tuple[str, str]:
    """What problems of several files have in common: their words without the names and figures of the file."""
    return re.sub(r"\d+", "", problem.says.replace(str(file.path), "")), problem.mend


def _remark_on_types(files: Sequence[TokenFile], remark: Remark) -> None:
    """Say of which files the width of ids was told by their bytes, where it is not nanoGPT's, and whose loss masks are not read."""
    kinds: dict[Any, list[TokenFile]] = {}
    for each in files:
        if not each.says_type and each.dtype.itemsize != 2:
            kinds.setdefault(each.dtype, []).append(each)
    for kind, same in kinds.items():
        more = f" and {len(same) - 1:,} more are" if same[1:] else " is"
        remark(f"{same[0].file.path}{more} read as {kind.itemsize}-byte ids: no header says it, their zero bytes do")
    masks = [each for each in files if each.file.path.with_name(f"{each.file.path.name}.loss").exists()]
    if masks:
        remark(f"{masks[0].file.path}.loss is not read: every token counts in the loss")


def _remark_on_json(files: Sequence[File], remark: Remark) -> None:
    """Say which files hold JSON by their first bytes and not by their names: they train as they are, braces and all."""
    for what, mend in JSON_AS_TEXT.items():
        held = [file for file in files if json_in_text(file) == what]
        if held:
            more = f" and {len(held) - 1:,} others" if held[1:] else ""
            remark(f"{held[0].path}{more}: {what} by what it holds, and text by its name: it trains as it is; {mend}")


def _remark_on_names(files: Sequence[File], names: set[str], remark: Remark) -> None:
    """Say which of several files train although a word of their names says that their writer held them out."""
    held = [file for file in files if names & set(re.split(r"[^a-z]+", file.name.lower()))]
    if held and len(held) < len(files):
        says = f"{len(held):,} of {len(files):,} files are named as if they were held out, such as {held[0].name}"
        remark(f"{says}: they train as the others do; a pattern leaves them out, such as data.path='FOLDER/**/train*'")
