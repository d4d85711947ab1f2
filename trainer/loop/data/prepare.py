"""`data` in a recipe becomes a corpus: read and tokenized once, then opened from the cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ...spec.problem import Unreadable
from ...spec.run import Data
from .corpus import Corpus, Runs, Source, Tokens, held_out, windows
from .find import TEXT, TOKENS, File, found, library
from .refusal import refused, wrong
from .sources import Progress, Way, key_of, text, token_ids
from .synthetic import Synthetic
from .tokenizer import Bytes, Tokenizer, tokenizer


def prepare(data: Data, *, vocab: int, seq: int, cache: Path, progress: Progress, verify: bool = True) -> Corpus:
    """The corpus that `data` names, tokenized below the folder `cache` unless it is there already; raises Unreadable.

    Any number of processes may call it at once: one works, the others wait. A call of progress with a total of 0 is a remark.
    `verify=False` trusts the sizes of files that another process of this node has just verified.
    """
    _check_words(data)
    read = _read(Way(data, vocab, cache.expanduser(), progress, verify))
    sources = tuple(
        Source(tokens=tokens, validation=validation, weight=weight)
        for (_, tokens, validation), weight in zip(read, data.weights or [1.0], strict=True)
    )
    key = key_of([[key for key, _, _ in read], data.weights, data.validation])
    corpus = Corpus(name=data.name, key=key, vocab=vocab, sources=sources, documents=data.documents)
    windows(corpus, seq, "train")
    return corpus


def cache_folder(data: Data) -> Path:
    """`data.cache`, or distrain/data below the user's cache folder (XDG base directory specification)."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distrain" / "data"
    return Path(data.cache).expanduser() if data.cache else default


def _read(way: Way) -> list[tuple[str, Tokens, Runs]]:
    """(key, tokens, what validates) of each source."""
    data = way.data
    if data.name == "synthetic":
        made = Synthetic(vocab=way.vocab)
        return [(f"synthetic {way.vocab}", made, held_out(0, np.array([0, made.size]), data.validation))]
    if data.name == "tokens":
        return [token_ids(way, files) for files in _groups(data, TOKENS)]
    by = tokenizer(data.tokenizer, data.end)
    _check_size(by, data, way.vocab)
    return [text(way, files, by) for files in ([library()] if data.name == "stdlib" else _groups(data, TEXT))]


def _check_words(data: Data) -> None:
    """Raises Unreadable where a path is missing or idle, or weights are not one a path."""
    reads, paths, problems = data.name in ("text", "tokens"), _paths(data), []
    if reads and not paths:
        problems.append(wrong(f"data={data.name} reads files, and data.path is not set", "set data.path=FILE, a folder or a pattern"))
    if paths and not reads:
        problems.append(wrong(f"data.path={paths[0]} is not read by data={data.name}", "set data=text or data=tokens, or data.path=null"))
    if data.weights and len(data.weights) != len(paths):
        problems.append(wrong(f"data.weights has {len(data.weights)} for {len(paths)} paths", "give each path of data.path a weight"))
    if problems:
        raise Unreadable(problems)


def _check_size(by: Tokenizer, data: Data, vocab: int) -> None:
    if not isinstance(by, Bytes) and by.size > vocab:
        says = f"data.tokenizer={data.tokenizer} has ids up to {by.size - 1}, and model.vocab={vocab}"
        raise refused(says, f"set model.vocab={by.size}")


def _paths(data: Data) -> tuple[str, ...]:
    return (data.path,) if isinstance(data.path, str) else data.path or ()


def _groups(data: Data, suffixes: tuple[str, ...]) -> list[list[File]]:
    """The files of each source: of each path where they have weights, of all paths where they have none."""
    groups = found(_paths(data), suffixes)
    return groups if data.weights else [[file for files in groups for file in files]]
