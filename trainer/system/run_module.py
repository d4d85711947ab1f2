"""Runs a module's main() in a process that ends with the one that started it: python -m distrain.trainer.system.run_module MODULE WORDS."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from .parent_watch import hold_from_environment


def main() -> int:
    """The status of the module's own main(); 130 at a Ctrl-C while it is imported."""
    hold_from_environment()
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    name, *sys.argv[1:] = sys.argv[1:]
    run = import_module(name).main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return int(run() or 0)


if __name__ == "__main__":
    raise SystemExit(main())
