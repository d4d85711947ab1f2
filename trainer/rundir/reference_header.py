"""What the head of RUN_DIR/reference.safetensors says, read without torch: whether all that a run needs is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..spec.derived.batch_levels import samples_before, steps_until
from ..spec.run import Run
from .checkpoints import checkpoints_folder, newest_saved
from .files import REFERENCE_FILE

WHOLE_KEY = "whole"  # of its metadata: "false" while pairs that the run reads are not computed yet
READS_KEY = "reads"  # of its metadata: the samples whose pairs are all in it, as `samples_read` gives them
_PLACE_KEYS = ("cache", "path", "tokenizer", "document_tokens", "validate")  # of data: other values may give the same pairs

Reads = dict[str, Any]


def has_whole_reference(run: Run, folder: Path, data_key: str | None = None) -> bool:
    """Return whether a run folder has the file, of the size that its head says, with every pair that the run reads from its newest
    checkpoint on; `data_key` identifies the run's tokens, where they are known. Files of earlier versions name no samples: they have those
    that the run was to read that wrote them."""
    path = folder / REFERENCE_FILE
    try:
        with open(path, "rb") as file:
            head_size = int.from_bytes(file.read(8), "little")
            if head_size > path.stat().st_size:
                return False
            head = json.loads(file.read(head_size))
        size = max((each["data_offsets"][1] for name, each in head.items() if name != "__metadata__"), default=0)
        words = head.get("__metadata__", {})
        if data_key is not None and data_key != json.loads(words.get("identity", "{}")).get("data", data_key):
            return False
        is_whole = (
            are_held(_samples_to_read(run, folder), json.loads(words[READS_KEY])) if READS_KEY in words else words.get(WHOLE_KEY) != "false"
        )
        return path.stat().st_size == 8 + head_size + size and is_whole
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return False


def samples_read(run: Run, first: int, end: int) -> Reads:
    """Return, as JSON values, which pairs a run reads: "samples" to train on, from `first` to `end`, "evaluated": how many of each split
    that is evaluated, and "of": what decides which pairs these are. The file's own say under "every" whether it has all pairs there are."""
    from msgspec import json as msgspec_json
    from msgspec import to_builtins

    data = {key: value for key, value in to_builtins(run.data).items() if key not in _PLACE_KEYS}
    of = [data, sorted(run.data.validate or ()), run.train.seed, run.train.seq]
    many = run.train.evaluate.batches * run.train.batch if run.train.evaluate.every else 0
    return {"samples": [first, end], "evaluated": many, "of": blake2b(msgspec_json.encode(of), digest_size=16).hexdigest()}


def are_held(needed: Mapping[str, Any], held: Mapping[str, Any]) -> bool:
    """Return whether the pairs of what a run needs are among those that are held."""
    if held["of"] != needed["of"]:
        return False
    (first, end), (needed_first, needed_end) = held["samples"], needed["samples"]
    in_range = first <= needed_first and needed_end <= end and held["evaluated"] >= needed["evaluated"]
    return bool(held.get("every") or in_range)


def union_of_reads(held: Reads | None, now: Reads) -> Reads:
    """Return the samples of both, where they are of the same pairs and follow on each other; else those of `now`."""
    if held is None or held["of"] != now["of"] or held["samples"][0] > now["samples"][1] or now["samples"][0] > held["samples"][1]:
        return now
    (first, end), (now_first, now_end) = held["samples"], now["samples"]
    return now | {"samples": [min(first, now_first), max(end, now_end)], "evaluated": max(held["evaluated"], now["evaluated"])}


def _samples_to_read(run: Run, folder: Path) -> Reads:
    """Return what a run reads from its newest checkpoint on, if its data are those that it was saved with."""
    saved, _ = newest_saved(checkpoints_folder(folder))
    extra, step = (saved.extra, saved.step) if saved else ({}, 0)
    sample, tokens = extra.get("samples", step * run.train.batch), extra.get("tokens", step * run.train.batch * run.train.seq)
    last = run.train.steps if run.train.steps is not None else step + steps_until(run.train, (run.train.tokens or 0) - tokens, tokens)
    return samples_read(run, sample, sample + samples_before(run.train, max(last - step, 0), tokens) + run.train.batch)
