"""Runs a module's main() in a process that ends with its parent: python -m distrain.trainer.system.run_module MODULE ARGUMENTS."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from .parent_watch import watch_parent_from_environment


def main() -> int:
    """Return the status of the module's own main(); exit with 130 at a Ctrl-C while it is imported."""
    watch_parent_from_environment()
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    name, *sys.argv[1:] = sys.argv[1:]
    module_main = import_module(name).main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return int(module_main() or 0)


if __name__ == "__main__":
    raise SystemExit(main())
