"""Rules of what can be read and makes no sense: names of folders, rates that rise, a window that ends before it begins; and the bounds
of what a plan looks at one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..spec.read import shown
from ..spec.run import Parallel, Run
from .block_costs import form
from .broken_rule import Broken
from .deepspeed.flat_tensors import MOST_LAYERS, MOST_RANKS
from .deepspeed.memory import stage_of
from .mesh import Mesh, together

MOST_NAME = 200  # bytes of a run's name: a file system takes 255, and names of folders beside it are longer
MOST_DIR = 2000  # bytes of log.dir
MOST_COUNTED = 100_000  # ranks of a mesh whose groups are looked at one by one


def folders(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A run's name is that of one folder, in the folder log.dir."""
    if why := _no_name(run.name):
        yield Broken("name", f"name={shown(run.name)} {why}", mend="write one word, as name=my_run: it names the run's folder in log.dir")
    if why := _no_folder(run.log.dir):
        yield Broken("dir", f"log.dir={shown(run.log.dir)} {why}", mend="name a folder, as log.dir=runs")


def _no_name(name: str) -> str:
    """Why a text is no name of a run; "" where it is."""
    if not name.strip():
        return "is empty"
    if name in (".", ".."):
        return "is no name of a folder"
    if "/" in name:
        return "holds /, and is the name of one folder"
    if name[0] in "-~.":
        return f"begins with {name[0]}"
    if name != name.strip():
        return "begins or ends with a space"
    return _unprintable(name) or _too_long(name, MOST_NAME)


def _no_folder(path: str) -> str:
    """Why a text is no path of a folder; "" where it is."""
    if not path.strip():
        return "is empty"
    if path.startswith("-"):
        return f"begins with -, as options do: ./{path} does not"
    return _unprintable(path) or _too_long(path, MOST_DIR)


def _unprintable(text: str) -> str:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return "is not text in UTF-8"
    odd = next((letter for letter in text if not letter.isprintable()), "")
    return f"holds {odd!r}" if odd else ""


def _too_long(text: str, most: int) -> str:
    return f"is longer than {most} bytes" if len(os.fsencode(text)) > most else ""


def rates(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A schedule leads from lr down to min_lr."""
    optim = run.optim
    if optim.schedule != "constant" and optim.min_lr > optim.lr:
        says = f"optim.min_lr={optim.min_lr:g} is above optim.lr={optim.lr:g}: optim.schedule={optim.schedule} would rise"
        yield Broken("min_lr", says, ((("optim.min_lr", float(f"{optim.lr / 10:.6g}")),),))


def window(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """A profiler's window has steps in it; they are counted from 1."""
    if run.log.profile is None:
        return
    first, last = run.log.profile
    if first > last:
        yield Broken("profile", f"log.profile=[{first},{last}]: its first step comes after its last", ((("log.profile", (last, first)),),))
    elif last == 0:
        yield Broken("profile", f"log.profile=[{first},{last}]: steps are counted from 1", ((("log.profile", (1, 1)),),))


def countable(run: Run, parallel: Parallel, microbatch: int) -> Iterator[Broken]:
    """What can only be found by looking at ranks one after the other is looked for among so many."""
    gpus, others = run.cluster.gpus, parallel.tp * parallel.pp * parallel.cp
    ranks = run.cluster.nodes * gpus
    dp = ranks // others if parallel.dp == "auto" else parallel.dp
    if dp * others != ranks or dp % parallel.ep:
        return
    if parallel.ep > 1 and parallel.cp > 1 and ranks > MOST_COUNTED:
        mesh = Mesh(pp=parallel.pp, dp=dp, cp=parallel.cp, ep=parallel.ep, tp=parallel.tp)
        if together(mesh.strides("copies"), gpus) is None:
            says = f"parallel.ep={parallel.ep} x parallel.cp={parallel.cp} ends on no borders of nodes of {gpus}"
            yield Broken("size", f"{says}: how {ranks:,} such ranks are wired is not counted", ((("parallel.cp", 1),),))
    layers, data = -(-run.model.layers // parallel.pp), dp * parallel.cp
    if layers > MOST_LAYERS and data > MOST_RANKS and (parallel.tp > 1 or form(run) == "torch"):
        stage = stage_of(parallel.zero, half=run.train.precision != "fp32", ep=parallel.ep)
        if stage in (1, 2):
            says = f"of {data:,} ranks that share {layers:,} layers under ZeRO {stage} the fullest is not looked for"
            mend = f"at most {MOST_LAYERS} layers a stage, or {MOST_RANKS:,} ranks of dp x cp"
            yield Broken("size", says, ((("parallel.zero", 3),),), mend)
