"""Python's garbage collection: none while modules are imported, and rare where objects are made by the million."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects after which Python looks through them, and times after which it looks through older ones too; by its own, 700, 10 and 10.
# To look so often takes a fifteenth of a `distrain plan`, and a seventh of the time of torch's compiler.
RARE = (50_000, 20, 100)


@contextmanager
def keep_imports() -> Iterator[None]:
    """Collect no garbage while the block imports modules, and leave out of later collections what is there then: it stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
