"""Checks a run's data before it is read: its keys, files and tokenizer, with every problem at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from ...spec.derived.data_blends import has_sources
from ...spec.numbers.as_text import plural
from ...spec.problem import Problem, Unreadable
from ...spec.run import Data
from .files import columnar
from .files.data_error import data_error, data_problem
from .files.find import DataFile, FileSearch, Remark, find_files, library_files
from .files.formats import (
    JSON_AS_TEXT,
    WRITE_PAIRS,
    WRITE_PREFERENCES,
    UnreadableFile,
    file_problem,
    holds_json_lines,
    json_in_text,
    line_suffixes,
    text_form,
    text_suffixes,
    unreadable_files,
)
from .source_reader import HELD_OUT
from .token_files import DATATROVE, TokenFile, open_token_file
from .tokenize.chats import SHAREGPT_KEY
from .tokenize.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

Got = TypeVar("Got")

TEXT_SEARCH = FileSearch(
    suffixes=text_suffixes(),
    companions=("dataset_info.json", "dataset_dict.json", "state.json"),
    described=".txt, .jsonl, .json, .ndjson (or one of them as .gz or .zst), .parquet or .arrow",
    mend="name files of other kinds with a pattern: data.path='{}/**/*{}'",
)
PAIR_SEARCH = FileSearch(
    suffixes=line_suffixes(),
    companions=TEXT_SEARCH.companions,
    described=".jsonl, .json or .ndjson (or one of them as .gz or .zst)",
    mend="name files of prompts and completions, an object a line",
)
TOKEN_SEARCH = FileSearch(
    suffixes=(".bin", ".npy", DATATROVE),
    companions=(".idx", *(f"{DATATROVE}.{each}" for each in ("index", "metadata", "loss"))),
    described=".bin, .npy or .ds",
    mend="",
)
FROM_FILES = ("text", "tokens", "pairs", "preferences")  # values of data.name that need data.path
READERS = {".zst": "zstandard", "parquet": "pyarrow", "arrow": "pyarrow"}  # the library that reads a kind of file
TEST_WORDS = {"test", "eval", "dev"}  # words in the names of held-out files, besides those of validation
_TABLES_OPENED = 64
_PADDED = 1.2  # a model's vocabulary is padded to at most this many times the tokenizer's size, plus 1024


@dataclass(frozen=True, kw_only=True)
class CheckedData:
    """The files of each source, token files opened, and the tokenizer of text."""

    groups: list[list[DataFile]]
    token_files: list[list[TokenFile]]
    tokenizer: Tokenizer | None


def check_data(data: Data, vocab: int, remark: Remark, *, trains: bool = True) -> CheckedData:
    """Return what there is to read; raises Unreadable with every problem of the keys, the files and the tokenizer. If it `trains`, files
    that are named like held-out data are remarked on."""
    problems = _key_problems(data)
    by, groups, read = None, list[list[DataFile]](), list[list[TokenFile]]()
    if data.name in ("text", "stdlib") or data.has_prompts:
        by = _try(problems, lambda: _load_tokenizer(data, vocab, remark))
    if data.name == "stdlib":
        groups = _try(problems, lambda: [library_files()]) or []
    elif data.name in FROM_FILES and paths_of(data):
        groups = _find_sources(data, remark, problems)
    files = [file for group in groups for file in group]
    if data.name == "text":
        problems += _text_problems(files, data.text_key)
        _remark_on_json(files, remark)
    elif data.has_prompts:
        problems += _pair_problems(files, data)
    elif data.name == "tokens":
        read = _open_token_files(data, vocab, groups, problems, remark)
        if data.end is not None and data.end >= vocab:
            problems.append(
                data_problem(f"data.end={data.end} is not in the vocabulary, model.vocab={vocab}", f"its ids end at {vocab - 1}")
            )
    if trains and data.name in FROM_FILES:
        _remark_on_names(files, TEST_WORDS if data.name == "tokens" else HELD_OUT | TEST_WORDS, remark)
    if problems:
        raise Unreadable(problems)
    return CheckedData(groups=groups, token_files=read, tokenizer=by)


def _try(problems: list[Problem], act: Callable[[], Got]) -> Got | None:
    """Return the value of a call, or None if it raises Unreadable; append to `problems`."""
    try:
        return act()
    except Unreadable as error:
        problems += error.problems
        return None


def _key_problems(data: Data) -> list[Problem]:
    """Return problems of the keys: a path that is missing or unused, and weights that do not match the paths."""
    reads, paths, problems = data.name in FROM_FILES, paths_of(data), []
    if reads and not paths:
        problems.append(
            data_problem(f"data={data.name} reads files, but data.path is not set", "set data.path=FILE, a folder or a pattern")
        )
    if paths and not reads:
        problems.append(
            data_problem(
                f"data.path={paths[0]} is not read by data={data.name}",
                "set data=text, data=tokens, data=pairs or data=preferences, or data.path=null",
            )
        )
    if data.weights and len(data.weights) != len(paths):
        problems.append(
            data_problem(
                f"data.weights has {plural(len(data.weights), 'weight')} for {plural(len(paths), 'path')}",
                "give each path of data.path one weight",
            )
        )
    return problems


def paths_of(data: Data) -> tuple[str, ...]:
    """Return `data.path` as a tuple."""
    return (data.path,) if isinstance(data.path, str) else data.path or ()


def _find_sources(data: Data, remark: Remark, problems: list[Problem]) -> list[list[DataFile]]:
    """Return the files of each source: of each path if paths have weights, else of all paths; append to `problems`."""
    chats = () if data.has_preferences else (data.messages_key, SHAREGPT_KEY)
    keys = (data.prompt_key, *chats) if data.has_prompts else (data.text_key,)
    search = TOKEN_SEARCH if data.name == "tokens" else PAIR_SEARCH if data.has_prompts else TEXT_SEARCH
    if data.name != "tokens":
        search = search._replace(accepts=lambda path: _is_text_of(path, keys))
    groups = find_files(paths_of(data), search, remark, problems)
    return groups if has_sources(data) else [[file for files in groups for file in files]]


def _is_text_of(path: Path, keys: Sequence[str]) -> bool:
    """Return whether a file of a folder is text, or pairs; a .json may hold something else."""
    return path.suffix.lower() != ".json" or any(holds_json_lines(path, key) for key in keys)


def _load_tokenizer(data: Data, vocab: int, remark: Remark) -> Tokenizer:
    by = load_tokenizer(data.tokenizer, data.end)
    if not isinstance(by, ByteTokenizer) and by.size > vocab:
        says = f"data.tokenizer={data.tokenizer} has ids up to {by.size - 1}, but model.vocab={vocab}"
        raise data_error(says, f"set model.vocab={by.size}")
    if vocab > _PADDED * by.size + 1024:
        hint = "; published weights need their own tokenizer: data.tokenizer=FOLDER" if isinstance(by, ByteTokenizer) else ""
        remark(f"data.tokenizer={data.tokenizer} has {by.size:,} ids, but model.vocab={vocab}: the other ids never occur{hint}")
    if by.end is None:
        remark(f"data.tokenizer={data.tokenizer} names no end-of-document token, so documents run together: data.end=ID sets one")
    return by


def _text_problems(files: Sequence[DataFile], key: str) -> list[Problem]:
    """Return problems of text files: unreadable ones, missing libraries, tables without the column."""
    problems, needed = unreadable_files(files, "text"), dict[str, str]()
    for file in files:
        for kind in text_form(file.path.name):
            needed.setdefault(READERS.get(kind, ""), str(file.path))
    missing = [name for name in needed if name and find_spec(name) is None]
    for name in missing:
        problems.append(data_problem(f"{needed[name]} needs {name}, which is not installed", "pip install 'distrain[data]'"))
    if problems:
        return problems
    columns: dict[UnreadableFile, list[DataFile]] = {}
    for file in [file for file in files if text_form(file.path.name)[0] in ("parquet", "arrow")][:_TABLES_OPENED]:
        try:
            columnar.check_column(str(file.path), text_form(file.path.name)[0], key)  # type: ignore[arg-type]
        except columnar.UnreadableTable as error:
            columns.setdefault(UnreadableFile(error.says, error.mend), []).append(file)
    return [file_problem(fault, files, verb="") for fault, files in columns.items()]


def _pair_problems(files: Sequence[DataFile], data: Data) -> list[Problem]:
    """Return problems of files of pairs: those of text files, and other forms than JSON lines."""
    others = [file for file in files if text_form(file.path.name)[0] != "lines"]
    write = WRITE_PREFERENCES if data.has_preferences else WRITE_PAIRS
    fault = UnreadableFile(f"no file of JSON lines by its name, which data={data.name} reads", write)
    return [file_problem(fault, others)] if others else _text_problems(files, data.text_key)


def _open_token_files(
    data: Data, vocab: int, groups: Iterable[Sequence[DataFile]], problems: list[Problem], remark: Remark
) -> list[list[TokenFile]]:
    """Open the files of each source; append to `problems`, also if documents are kept apart and a file does not say where they end."""
    read: list[list[TokenFile]] = []
    kinds: dict[tuple[str, str], list[Problem]] = {}
    for group in groups:
        read.append([])
        for file in group:
            try:
                read[-1].append(open_token_file(file, vocab))
            except Unreadable as error:
                kinds.setdefault(_without_figures(error.problems[0], file), []).extend(error.problems)
            except OSError as error:
                problems.append(data_problem(f"{file.path}: {error.strerror or error}"))
    for same in kinds.values():
        more = f" (and {len(same) - 1:,} more)" if same[1:] else ""
        problems.append(data_problem(same[0].says + more, same[0].mend))
    files = [each for group in read for each in group]
    unbounded = next((each.file.path for each in files if each.bounds is None), None)
    if data.documents and data.end is None and unbounded:
        says = f"data.documents=true, but {unbounded} does not say where documents end"
        problems.append(data_problem(says, "set data.end to the token id that ends one (GPT-2: 50256)"))
    _remark_on_types(files, remark)
    return read


def _without_figures(problem: Problem, file: DataFile) -> tuple[str, str]:
    """Return what problems of several files have in common: their text without the file's name and figures."""
    return re.sub(r"\d+", "", problem.says.replace(str(file.path), "")), problem.mend


def _remark_on_types(files: Sequence[TokenFile], remark: Remark) -> None:
    """Remark on files whose id width was inferred and is not nanoGPT's, and on loss masks, which are not read."""
    kinds: dict[Any, list[TokenFile]] = {}
    for each in files:
        if not each.says_type and each.dtype.itemsize != 2:
            kinds.setdefault(each.dtype, []).append(each)
    for kind, same in kinds.items():
        more = f" and {len(same) - 1:,} more are" if same[1:] else " is"
        remark(f"{same[0].file.path}{more} read as {kind.itemsize}-byte ids: there is no header, but the zero bytes show the width")
    masks = [each for each in files if each.file.path.with_name(f"{each.file.path.name}.loss").exists()]
    if masks:
        remark(f"{masks[0].file.path}.loss is not read: every token counts in the loss")


def _remark_on_json(files: Sequence[DataFile], remark: Remark) -> None:
    """Remark on files that hold JSON but are named as text: they train as they are, braces included."""
    kinds: dict[str, list[DataFile]] = {}
    for file in files:
        kinds.setdefault(json_in_text(file), []).append(file)
    for what, mend in JSON_AS_TEXT.items():
        if held := kinds.get(what):
            more = f" and {len(held) - 1:,} others" if held[1:] else ""
            remark(f"{held[0].path}{more}: it holds {what}, but its name says text, so it trains as it is, braces included; {mend}")


def _remark_on_names(files: Sequence[DataFile], names: set[str], remark: Remark) -> None:
    """Remark on files that train although their names say that they are held out."""
    held = [file for file in files if names & set(re.split(r"[^a-z]+", file.name.lower()))]
    if held and len(held) < len(files):
        says = f"{len(held):,} of {len(files):,} files are named like held-out data, such as {held[0].name}"
        remark(f"{says}: they train like the others; a pattern can leave them out: data.path='FOLDER/**/train*'")
