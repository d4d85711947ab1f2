"""What a search is confined to: the keys that the command line fixes, and the sizes of cluster to compare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from ...trainer.spec.problem import Problem, Unreadable
from ..arguments.cluster_argument import SHAPE_DEGREES
from ..config.load import Loader
from ..keys import config_files
from ..recipe_files import yaml_edit

SEARCHED = ("parallel.", "train.microbatch", "train.compile", "engine")  # keys that a search chooses
MOST_SIZES = 16
MOST_NODES = 1 << MOST_SIZES - 1  # on which search.within looks, where search.nodes is not set


def fixed_keys(overrides: Sequence[str], config_dir: Path | None) -> frozenset[str]:
    """Return the keys that a search would choose and that the command line sets, one by one, by a group's option, or by the cluster's
    size."""
    user = Loader(config_dir).sort(overrides)
    keys = {key for key in user.values if key.startswith(SEARCHED)}
    for choice in user.choices:
        if choice.key == "parallel" and not choice.deletes:
            keys |= set(_option_keys(choice.value, config_dir))
    if user.shape and len(re.split("[xX]", user.shape)) == 3:
        keys |= {f"parallel.{name}" for name in SHAPE_DEGREES}
    return frozenset(keys)


def _option_keys(name: str, config_dir: Path | None) -> Iterator[str]:
    """Yield the keys that an option of group parallel sets, but for those of the default."""
    file = config_files.options("parallel", config_dir)[name]
    for key in yaml_edit.text_values(file.read_text()) if name != "default" else ():
        if not key.startswith("defaults"):
            yield f"parallel.{key}"


def node_counts(text: str) -> list[int]:
    """Return the numbers of nodes of `search.nodes`, ascending, at most MOST_SIZES: FIRST..LAST doubles from the first, FIRST..LAST+STEP
    adds; raises Unreadable."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*(?:\.\.\s*(\d{1,9})\s*(?:\+\s*(\d{1,9})\s*)?)?", text)
    first, last, step = (int(found[1]), int(found[2] or found[1]), int(found[3] or 0)) if found else (0, 0, 0)
    if not 0 < first <= last or (found is not None and found[3] is not None and not step):
        mend = "write it as 8..512, which doubles, or as 64..128+16, which adds"
        raise Unreadable([Problem(rule="type", says=f"search.nodes={text} is not a range of nodes", mend=mend)])
    counts = range(first, last + 1, step) if step else (first << power for power in range(MOST_SIZES))
    return [count for count in islice(counts, MOST_SIZES) if count <= last]
