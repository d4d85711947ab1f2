"""Starts a fork server: python -m distrain.trainer.loop.forkserver [MODULE], whose `main` serves; without one, that of `distrain prove`."""

from __future__ import annotations

import gc
import importlib
import sys


def main() -> int:
    """Import the module without garbage collection, which takes a sixth of the imports' time and finds nothing; `serve` goes on with it.
    Return the exit status of its `main`."""
    gc.disable()
    module = importlib.import_module(sys.argv[1] if sys.argv[1:] else "distrain.trainer.loop.forkserver.server")
    return int(module.main())


if __name__ == "__main__":
    raise SystemExit(main())
