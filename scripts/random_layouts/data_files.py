"""The small files of text, tokens, pairs and preferences that drawn recipes read: the same bytes each time they are written."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ...trainer.system.atomic_file import write_atomically

WORDS = (
    *("the", "a", "of", "gradient", "weight", "stage", "layer", "rank", "step", "sum", "token", "head", "moves", "adds", "waits"),
    *("reads", "holds", "each", "no", "one", "two", "all"),
)
DOCUMENTS = 150  # of each file
LONGEST_DOCUMENT = 120  # words
LONGEST_ANSWER = 12  # words
TOKENS = 20_000  # of each file of tokens, below 250

KINDS = {"text": ".jsonl", "tokens": ".bin", "pairs": ".jsonl", "preferences": ".jsonl"}  # data.name -> the files' suffix
NAMES = ("one", "two", "held")  # files of each kind, the last for validation alone


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The files in a folder: `paths[data.name]` names each kind's."""

    paths: Mapping[str, tuple[Path, ...]]


def write_data_files(folder: Path) -> DataFiles:
    """Write all files, and return where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {kind: tuple(folder / f"{kind}_{name}{suffix}" for name in NAMES) for kind, suffix in KINDS.items()}
    for kind, files in paths.items():
        for path in files:
            content = _content(kind, Random(path.name))
            if not path.is_file() or path.read_bytes() != content:
                write_atomically(path, content)
    return DataFiles(paths=paths)


def _content(kind: str, random: Random) -> bytes:
    if kind == "tokens":
        return array("H", (random.randrange(1, 250) for _ in range(TOKENS))).tobytes()
    return "".join(f"{json.dumps(row)}\n" for row in _rows(kind, random)).encode()


def _rows(kind: str, random: Random) -> Iterable[Mapping[str, str]]:
    for _ in range(DOCUMENTS):
        match kind:
            case "text":
                yield {"text": _text(random, LONGEST_DOCUMENT)}
            case "pairs":
                yield {"prompt": _text(random, LONGEST_ANSWER), "completion": _text(random, LONGEST_ANSWER)}
            case _:
                chosen, rejected = _text(random, LONGEST_ANSWER), _text(random, LONGEST_ANSWER)
                yield {"prompt": _text(random, LONGEST_ANSWER), "chosen": chosen, "rejected": rejected}


def _text(random: Random, longest: int) -> str:
    """Words with a structure that a model can learn: each is often followed by its neighbour in the list."""
    place, words = random.randrange(len(WORDS)), list[str]()
    for _ in range(random.randint(2, longest)):
        words.append(WORDS[place])
        place = (place + 1) % len(WORDS) if random.random() < 0.7 else random.randrange(len(WORDS))
    return " ".join(words)
