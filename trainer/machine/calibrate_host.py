"""The program that measures one host for `distrain calibrate`, started over ssh: python -m distrain.trainer.machine.calibrate_host.

stdin has lines of JSON: the request, then an answer to each stage that this program has reached; the end of stdin, as when ssh or the
controller has ended, kills this program with all its processes. stdout has lines of JSON behind MARK, since a login shell may print too:
{"stage": name}, {"progress": text}, {"found": a DeviceMeasurement}, {"links": a mapping for each device, "bytes": of the long
all-reduces}, {"problem", "mend"}.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from ..system.cpu import cpu_count
from ..system.reserved_port import reserve_port
from .device_probe import CPU, CUDA, NoSuchDevices, ProbeSizes, measure
from .link_probe import HostPlace, measure_links
from .process_pool import Show, run_processes, start_method

MARK = "distrain-host "


def main() -> int:
    """Measure this host's devices, then, with the other hosts, the links between them."""
    with suppress(OSError):
        os.setpgid(0, 0)  # the end of stdin kills this group
    lines: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
    request = lines.get()
    signal.alarm(int(request["seconds"]))  # also where no Python thread can run; the children die with this process
    os.environ.update(request["environment"])
    out = os.dup(1)
    os.dup2(2, 1)

    def emit(message: Mapping[str, Any]) -> None:
        os.write(out, f"\n{MARK}{json.dumps(message)}\n".encode())

    def reach(stage: str, **more: Any) -> dict[str, Any]:
        """Report a stage, and wait until all hosts have reached it; return the controller's answer."""
        emit({"stage": stage, **more})
        return lines.get()

    try:
        import_module("torch")  # takes seconds; from here on all hosts are equally far
        reach("devices")
        sizes = (CUDA if request["kind"] == "cuda" else CPU)._replace(**request["sizes"])
        emit({"found": measure(request["kind"], request["devices"], lambda text: emit({"progress": text}), sizes)})
        if request["hosts"] > 1:
            with reserve_port() as reserved:
                meeting = reach("links", port=reserved.getsockname()[1])
                place = HostPlace(request["host"], request["hosts"], meeting["address"], meeting["port"])
                rows = _measure_links(request["devices"], place, sizes, lambda text: emit({"progress": text}))
            emit({"links": rows, "bytes": sizes.reduced})
    except NoSuchDevices as error:
        says, mend = error.args
        emit({"problem": says, "mend": mend})
    except Exception as error:
        emit({"problem": next(iter(str(error).splitlines()), "") or repr(error), "mend": ""})
    return 0


def _read_lines(lines: queue.Queue[dict[str, Any]]) -> None:
    """Put each line of stdin on the queue; at its end kill this process group. It reads the descriptor, because a fork while another
    thread reads `sys.stdin` would hang the child."""
    rest = b""
    while data := os.read(0, 1 << 16):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            lines.put(json.loads(line))
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _measure_links(count: int, place: HostPlace, sizes: ProbeSizes, show: Show) -> list[dict[str, Any]]:
    cuda = sizes.device == "cuda"
    threads = 1 if cuda else max(1, cpu_count() // count)
    act = partial(measure_links, place=place, sizes=sizes, threads=threads)
    return run_processes(act, count, start_method(has_gpus=cuda), show)


if __name__ == "__main__":
    sys.exit(main())
