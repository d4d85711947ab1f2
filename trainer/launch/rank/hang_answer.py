"""What a rank answers when it is asked about a hang: at SIGUSR2 the stacks of its threads, at SIGURG its newest collectives.

Neither needs the main thread, which may wait for a message or a device. faulthandler writes the stacks to the log in its signal handler,
without Python's lock. For SIGURG Python's own handler writes the signal's number to a pipe, also at once, and a thread reads it. Both let
the system call that they interrupt go on. A process that handles no SIGURG ignores it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence

import msgspec

from .channel import Channel
from .group_record import GroupRecord

READ_SIZE = 512


class HangAnswer:
    """Answers from now on; `read` is called for the collectives once it is set. Only the main thread can make one."""

    def __init__(self, channel: Channel) -> None:
        self.read: Callable[[], Sequence[GroupRecord]] | None = None
        self._channel = channel
        self._asked, write_end = os.pipe()
        os.set_blocking(write_end, False)
        faulthandler.register(signal.SIGUSR2)
        signal.signal(signal.SIGURG, lambda *_: None)  # only for set_wakeup_fd
        signal.siginterrupt(signal.SIGURG, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="hang answer", daemon=True).start()

    def _listen(self) -> None:
        while data := os.read(self._asked, READ_SIZE):  # the numbers of all signals that Python handles
            if signal.SIGURG in data:
                with contextlib.suppress(Exception):  # no rank fails for want of a record
                    self._report()

    def _report(self) -> None:
        records = msgspec.to_builtins(self.read() if self.read else ())
        if records:
            self._channel.report_collectives(records)
            os.write(2, f"collectives: {json.dumps(records)}\n".encode())
