"""RUN_DIR/reference.safetensors: the log probabilities of answers under the weights that a run began with, and what they are of."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ...rundir.files import REFERENCE_FILE
from ...spec.run import Run
from ...system.atomic_file import write_atomically
from ..data.samples.corpus import Corpus

_END = 1 << 16  # bytes read at both ends of a file of weights
_VERSION = 1

Identity = dict[str, Any]
Reference = list[NDArray[np.float64]]  # of each source: [pairs, 2], nan of pairs that are not known


def reference_identity(run: Run, corpus: Corpus) -> Identity:
    """Return what log probabilities depend on: the weights that a run begins with, the tokens, and the window that cuts them.

    `weights`: of files their names, sizes and ends, None where the folder is gone; of drawn weights the model and the seed.
    """
    identity = {"version": _VERSION, "data": corpus.key, "seq": run.train.seq}
    if run.model.weights:
        return identity | {"weights": _files_identity(Path(run.model.weights).expanduser())}
    # What may change on a resume is no part of it.
    model = replace(run.model, hf=None, dropout=0.0, vocab_multiple=1, aux_loss=0.0, router=run.model.router.form)
    drawn = msgspec.json.encode((model, run.train.seed, run.optim.mup))
    return identity | {"weights": blake2b(drawn, digest_size=16).hexdigest()}


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


def write_reference(folder: Path, reference: Sequence[NDArray[np.float64]], identity: Identity) -> None:
    """Write the file; raises OSError, and then it is as it was."""
    tensors = {str(index): each for index, each in enumerate(reference)}
    words = {"identity": json.dumps(identity), "hash": _hash(reference)}
    write_atomically(folder / REFERENCE_FILE, save(tensors, metadata=words))


class HeldReference(NamedTuple):
    """What RUN_DIR holds: the log probabilities (None: none that can be used), what they are of, and what is wrong with a file that can't
    be used."""

    values: Reference | None
    identity: Identity
    problem: str = ""


def read_reference(folder: Path, identity: Identity) -> HeldReference:
    """Return the log probabilities that the file holds, if they are of this identity."""
    path = folder / REFERENCE_FILE
    if not path.exists():
        return HeldReference(None, identity)
    try:
        with safe_open(path, framework="numpy") as file:
            words = file.metadata() or {}
            reference = [file.get_tensor(str(index)) for index in range(len(list(file.keys())))]
    except (SafetensorError, OSError) as error:
        return HeldReference(None, identity, f"{REFERENCE_FILE} can't be read ({error})")
    if words.get("hash") != _hash(reference):
        return HeldReference(None, identity, f"{REFERENCE_FILE} is damaged")
    found: Identity = json.loads(words["identity"])
    if identity["weights"] is None:  # their folder is gone: nothing says that they are others
        identity = identity | {"weights": found.get("weights")}
    if others := [name for name in identity if found.get(name) != identity[name]]:
        return HeldReference(None, identity, f"{REFERENCE_FILE} is of other {' and '.join(_NAMES.get(name, name) for name in others)}")
    return HeldReference(reference, identity)


_NAMES = {"weights": "start weights", "seq": "lengths of sequences"}


def _hash(reference: Sequence[NDArray[np.float64]]) -> str:
    found = blake2b(digest_size=16)
    for each in reference:
        found.update(each.tobytes())
    return found.hexdigest()
