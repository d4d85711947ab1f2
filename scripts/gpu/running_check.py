"""One check while it runs: a process with a deadline, and what becomes of it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from ...trainer.system.child_process import module_arguments, start_child
from .check_context import CheckContext
from .checks import CheckRequest, GpuCheck

POLL = 0.05  # seconds

# failed: it ran, and figures are not as they must be; skipped: it needs another machine
Status = Literal["passed", "failed", "broken", "skipped", "not run"]

STOPPED: tuple[Status, ...] = ("broken", "skipped")  # without figures


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of a check."""

    name: str
    status: Status
    seconds: float = 0.0
    says: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether it needs not be carried out again."""
        return self.status in ("passed", "failed")  # what is skipped here another machine may carry out, and a skip costs seconds


class RunningCheck:
    """A check in a process of its own, which is killed at its deadline, or after `left` seconds, with all that it has started.

    Use it in a `with` block, whose end kills it.
    """

    def __init__(self, check: GpuCheck, context: CheckContext, left: float) -> None:
        self.check, self._left = check, left
        self._seconds = min(check.seconds, left)
        stem = check.name.replace(" ", ".")
        request, self._found, self._log = (context.folder / f"{stem}.{end}" for end in ("request.json", "finding.json", "log"))
        self._found.unlink(missing_ok=True)
        request.write_bytes(CheckRequest(check=check, context=context).to_json())
        self._began = time.monotonic()
        arguments = module_arguments("distrain.scripts.gpu.check_process", str(request), str(self._found))
        with ExitStack() as stack:
            output = stack.enter_context(self._log.open("wb"))
            self._child = stack.enter_context(
                start_child(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            )  # fmt: skip
            self._resources = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill it and all that it has started; does nothing the second time."""
        self._resources.close()

    def row(self) -> Row | None:
        """Return what became of it, None while it runs; one that is over its time is killed."""
        code, taken = self._child.poll(), time.monotonic() - self._began
        if code is None and taken < self._seconds:
            return None
        self.close()
        return self._outcome(code, round(taken, 2))

    def wait(self) -> Row:
        """Wait for its end, at most until it is killed."""
        while (row := self.row()) is None:
            time.sleep(POLL)
        return row

    def _outcome(self, code: int | None, taken: float) -> Row:
        name = self.check.name
        if code is None and self._left < self.check.seconds:
            return Row(name=name, status="not run", seconds=taken, says=[f"cut after {self._seconds:.0f} s: the program's time was over"])
        if code is None:
            return Row(name=name, status="broken", seconds=taken, says=[f"killed after {self._seconds:.0f} s"])
        if not self._found.exists():
            return Row(name=name, status="broken", seconds=taken, says=[f"its process ended with {code}", *self._last_lines()])
        answer = json.loads(self._found.read_bytes())
        for status in STOPPED:
            if status in answer:
                return Row(name=name, status=status, seconds=taken, says=[answer[status]])
        departures = answer["departures"]
        return Row(
            name=name, status="failed" if departures else "passed", seconds=taken, says=departures, figures=answer["figures"]
        )  # fmt: skip

    def _last_lines(self) -> Iterator[str]:
        yield from self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-2:]
