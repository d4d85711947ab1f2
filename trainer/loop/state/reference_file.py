"""RUN_DIR/reference.safetensors: the log probabilities of answers under the weights that a run began with, and what they are of."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ...rundir.files import REFERENCE_FILE
from ...rundir.reference_header import READS_KEY, WHOLE_KEY, Reads
from ...spec.run import Run
from ...system.atomic_file import write_atomically
from ..data.samples.corpus import Corpus

_END = 1 << 16  # bytes read at both ends of a file of weights
_VERSION = 1

Identity = dict[str, Any]
Reference = list[NDArray[np.float64]]  # of each source of a corpus: [pairs, 2], nan of pairs that are not known
References = Mapping[str, Reference]  # by the key of their corpus


def reference_identity(run: Run, corpus: Corpus) -> Identity:
    """Return what log probabilities depend on: the weights that a run begins with, the tokens of its training corpus, and the window that
    cuts them.

    `weights`: of files, an adapter's among them, their names, sizes and ends, None where a folder is gone; of drawn weights the model and
    the seed.
    """
    identity = {"version": _VERSION, "data": corpus.key, "seq": run.train.seq}
    if run.model.weights:
        adapter = [run.model.lora.weights] if run.model.lora.rank and run.model.lora.weights else []
        found = [_files_identity(Path(each).expanduser()) for each in (run.model.weights, *adapter)]
        scale = [f"x {run.model.lora.scale:g}"] if adapter else []
        return identity | {"weights": None if None in found else " ".join([*(each for each in found if each), *scale])}
    # What may change on a resume is no part of it; nor are keys at their defaults, so that a key added later changes nothing.
    lora = replace(run.model.lora, dropout=0.0)
    model = replace(run.model, hf=None, dropout=0.0, vocab_multiple=1, aux_loss=0.0, router=run.model.router.form, lora=lora)
    drawn = msgspec.json.encode((_changed_values(model), run.train.seed, run.optim.mup))
    return identity | {"weights": blake2b(drawn, digest_size=16).hexdigest()}


def _changed_values(section: Any) -> dict[str, Any]:
    """Return the fields of a section, by name, that are not at their defaults; of sections in it theirs."""
    found = {}
    for each in fields(section):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if (value := getattr(section, each.name)) != default:
            found[each.name] = _changed_values(value) if is_dataclass(value) else value
    return found


def _files_identity(folder: Path) -> str | None:
    found = blake2b(digest_size=16)
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    try:
        for path in files:
            with open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                found.update(f"{path.name} {size} ".encode())
                for begin in (0, max(0, size - _END)):
                    file.seek(begin)
                    found.update(file.read(_END))
    except OSError:
        return None
    return found.hexdigest() if files else None


def write_reference(folder: Path, references: References, identity: Identity, *, is_whole: bool = True, reads: Reads | None = None) -> None:
    """Write the file; `is_whole` if it has all pairs that the run reads, `reads` the samples whose pairs it has all, if any are known.
    Raises OSError, and then it is as it was."""
    tensors = {f"{key}/{index}": each for key, reference in references.items() for index, each in enumerate(reference)}
    words = {"identity": json.dumps(identity), "hash": _hash(tensors), WHOLE_KEY: json.dumps(is_whole)}
    every = not any(np.isnan(each).any() for each in tensors.values())
    words |= {READS_KEY: json.dumps(reads | {"every": every})} if reads else {}
    write_atomically(folder / REFERENCE_FILE, save(tensors, metadata=words))


class HeldReference(NamedTuple):
    """What RUN_DIR holds: the log probabilities that can be used, what those of the run are of, why those of its training corpus can't be
    used, and the samples whose pairs are all among them, if any are known."""

    values: References
    identity: Identity
    problem: str = ""
    reads: Reads | None = None


def read_reference(folder: Path, identity: Identity) -> HeldReference:
    """Return the log probabilities that the file holds, if they are of the weights and the length of this identity."""
    path = folder / REFERENCE_FILE
    if not path.exists():
        return HeldReference({}, identity)
    try:
        with safe_open(path, framework="numpy") as file:
            words = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    except (SafetensorError, OSError) as error:
        return HeldReference({}, identity, f"{REFERENCE_FILE} can't be read ({error})")
    if not all(name.rpartition("/")[2].isdecimal() for name in tensors) or words.get("hash") != _hash(tensors):
        return HeldReference({}, identity, f"{REFERENCE_FILE} is damaged")
    found: Identity = json.loads(words["identity"])
    if identity["weights"] is None:  # their folder is gone: nothing says that they are others
        identity = identity | {"weights": found.get("weights")}
    others = [name for name in identity if found.get(name) != identity[name]]
    problem = f"{REFERENCE_FILE} is of other {' and '.join(_NAMES.get(name, name) for name in others)}" if others else ""
    reads = json.loads(words[READS_KEY]) if READS_KEY in words and not others else None
    return HeldReference(_by_corpus(tensors, found) if others in ([], ["data"]) else {}, identity, problem, reads)


_NAMES = {"weights": "start weights", "seq": "lengths of sequences"}


def _by_corpus(tensors: Mapping[str, NDArray[np.float64]], identity: Identity) -> References:
    """Return the tensors by corpus and source. Files of earlier versions hold those of the training corpus alone, by source."""
    found = dict[str, dict[int, NDArray[np.float64]]]()
    for name, each in tensors.items():
        key, _, source = name.rpartition("/")
        found.setdefault(key or identity["data"], {})[int(source)] = each
    return {key: [each for _, each in sorted(of.items())] for key, of in found.items()}


def _hash(tensors: Mapping[str, NDArray[np.float64]]) -> str:
    found = blake2b(digest_size=16)
    for _, each in sorted(tensors.items(), key=_place):
        found.update(each.tobytes())
    return found.hexdigest()


def _place(item: tuple[str, object]) -> tuple[str, int]:
    key, _, source = item[0].rpartition("/")
    return key, int(source)
