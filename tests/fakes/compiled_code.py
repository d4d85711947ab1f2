"""The code that torch's compiler makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._inductor.graph import GraphLowering


@contextmanager
def code_of_compiler() -> Iterator[list[str]]:
    """The code of each graph that is compiled meanwhile, whatever was compiled before.

    torch's `run_and_get_code` is for one call: before each it forgets all graphs, which are then compiled once a call.
    """
    torch._dynamo.reset()
    made = list[str]()
    with patch.object(GraphLowering, "save_output_code", made.append):
        yield made
