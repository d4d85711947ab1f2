"""How a forked process ends: with the status of what it ran, and without the exit handlers of the process that forked it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def exit_with_status_of(act: Callable[[], int]) -> NoReturn:
    """Call `act` and exit with the status that it returns or exits with; 1 after an exception, whose traceback goes to stderr."""
    status = 1
    try:
        status = act()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
