"""Postpones the import of torch._dynamo, a third of a rank's start, in processes that compile nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"

Function = Callable[..., Any]


def _leave_as_is(function: Function | None = None, *_: Any, **options: Any) -> Any:
    """Return the function, or a decorator that does: nothing compiles it."""
    return function if function is not None else _leave_as_is


class LazyDynamo(ModuleType):
    """Stands for torch._dynamo in a process that compiles nothing.

    Every optimizer of torch 2.13 imports torch._dynamo, and sympy with it, only for functions that do nothing outside a compiled
    one. Reading anything else from this module imports the real one, which takes its place.
    """

    disable = allow_in_graph = staticmethod(_leave_as_is)

    @staticmethod
    def graph_break(*_: Any, **options: Any) -> None:
        """Do nothing: no graph is recorded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # __path__ is read for the import of a submodule
            raise AttributeError(name)
        return getattr(_import_dynamo(), name)


def disable_compile() -> None:
    """Make torch.compile return its argument, as TORCHDYNAMO_DISABLE=1 does, but without an import of torch._dynamo.

    DeepSpeed compiles functions of its own where it is imported. Does nothing where torch._dynamo is imported already.
    """
    if NAME not in sys.modules:
        torch.compile = _leave_as_is  # type: ignore[assignment]
        sys.modules[NAME] = torch._dynamo = LazyDynamo(NAME)


def _import_dynamo() -> ModuleType:
    if isinstance(sys.modules.get(NAME), LazyDynamo):
        del sys.modules[NAME], torch._dynamo
    return importlib.import_module(NAME)  # sets torch._dynamo too
