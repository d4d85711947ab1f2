"""The preflight's program on a host. The text of this file is sent over ssh to `python -`, so it needs only Python 3.8.

There are three rounds, each run on every host at once: `facts`; `links`, in which each host connects to all others; `reduced`, an
all-reduce of one process per host over gloo or NCCL. An answer is a line of JSON behind MARK, since a login shell may print before it.
A program whose ssh has ended, or whose time is up, exits and leaves nothing; `clear` removes the note of a `facts` that no `links`
followed. The note is a file in the run folder, by which hosts see whether they share it; without a folder nothing is written.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterable
from typing import Any

MARK = "distrain-preflight "
PACKAGES = ("distrain", "torch", "deepspeed")
CODE = ("cli", "conf", "recipes", "trainer")  # folders of distrain whose files must be the same on all hosts
TRIES = 3  # timed all-reduces, after one that is not timed


def main(order: str) -> None:
    """Answer one round; the process exits at its deadline, or when the reader of its answer is gone."""
    asked = json.loads(order)
    signal.alarm(int(asked["seconds"]) + 2)  # also where no Python thread can run
    threading.Thread(target=_exit_at_deadline, args=(asked,), daemon=True).start()
    answer = {"facts": host_facts, "links": check_links, "reduced": time_all_reduce, "clear": remove_note}[asked["round"]](asked)
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def _exit_at_deadline(asked: dict[str, Any]) -> None:
    """End this process at its deadline or when stdout has no reader, as when its ssh has ended."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)  # POLLERR and POLLHUP are always reported
    watched.poll(1000 * asked["seconds"] + 1000)
    if "note" in asked:
        remove_note(asked)
    os._exit(1)


def remove_note(asked: dict[str, Any]) -> dict[str, Any]:
    """Remove the note of this host."""
    if asked["folder"]:
        with contextlib.suppress(OSError):
            os.remove(os.path.join(asked["folder"], asked["note"]))
    return {}


def host_facts(asked: dict[str, Any]) -> dict[str, Any]:
    """Return versions, devices, the clock, an address, the run folder's state and a free port."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    said = {
        "clock": time.time(),
        "versions": package_versions(asked.get("packages", ())),
        "home": [socket.gethostname(), _read("/proc/sys/kernel/random/boot_id")],
        "address": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "cards": gpu_memory() if asked["kind"] == "cuda" else [],
        "folder": probe_folder(asked["folder"], asked["note"]) if asked["folder"] else {},
        "port": port,
    }
    return said if asked.get("leave") else {**said, **remove_note(asked)}


def package_versions(further: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, the packages of every rank and `further` ones, "" for a missing one; `code` is a checksum of
    distrain's own files."""
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *further):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    spec = find_spec("distrain")
    found["code"] = code_checksum(spec.origin) if spec and spec.origin else ""
    return found


def code_checksum(origin: str) -> str:
    """Return a checksum of distrain's files; `origin` is its __init__.py."""
    total, root = 0, os.path.dirname(os.path.realpath(origin))
    for top in CODE:
        for path in sorted(glob.glob(os.path.join(root, top, "**", "*.*"), recursive=True)):
            if path.endswith((".py", ".yaml")):
                with open(path, "rb") as file:
                    total = zlib.crc32(path[len(root) :].encode() + file.read(), total)
    return f"{total:08x}"


def gpu_memory() -> list[tuple[int, int, int]] | None:
    """Return (index, bytes used, bytes) of each GPU from nvidia-smi; None where that fails."""
    query = ["nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10, check=True).stdout.decode()
        rows = [[int(word) for word in line.split(",")] for line in said.splitlines()]
        return [(index, used << 20, total << 20) for index, used, total in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def probe_folder(path: str, note: str) -> dict[str, Any]:
    """Write `note` into the run folder for the other hosts to see; return its free bytes, or why it can't be written to."""
    try:
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, note), "w"):
            pass
        return {"free": shutil.disk_usage(path).free}
    except OSError as error:
        return {"problem": error.strerror}


def check_links(asked: dict[str, Any]) -> dict[str, Any]:
    """Connect to all other hosts, and accept their connections: {"reached": {host: seconds}, "failed": {host: why}, "unseen": hosts}.

    `others` is {host: [address, port, note]}; a host is unseen if its note is not in this host's run folder.
    """
    until = time.monotonic() + asked["seconds"] - 2
    word, others = asked["word"].encode(), asked["others"]
    reached: dict[str, float] = {}
    failed: dict[str, str] = {}
    unseen = _unseen_notes(asked["folder"], others) if asked["folder"] else []
    accepted: list[int] = []
    with _listener(asked["port"]) as listener:
        threading.Thread(target=_accept_connections, args=(listener, word, accepted), daemon=True).start()
        threads = [
            threading.Thread(target=_connect, args=(name, address, port, word, until, reached, failed), daemon=True)
            for name, (address, port, _) in others.items()
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(max(0.0, until + 1 - time.monotonic()))
        while len(accepted) < len(others) and time.monotonic() < until:
            time.sleep(0.01)
    remove_note(asked)
    return {"reached": reached, "failed": failed, "unseen": unseen}


def _unseen_notes(path: str, others: dict[str, Any]) -> list[str]:
    """Return the hosts whose notes are not here; a shared file system may take a moment to show them."""
    left = dict(others)
    for _ in range(20):
        left = {name: row for name, row in left.items() if not os.path.exists(os.path.join(path, row[2]))}
        if not left:
            break
        time.sleep(0.1)
    return sorted(left)


def _listener(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", port))
    listener.listen(1024)
    return listener


def _accept_connections(listener: socket.socket, word: bytes, accepted: list[int]) -> None:
    while True:
        try:
            connection = listener.accept()[0]
            with connection:
                connection.settimeout(5.0)
                if connection.recv(len(word)) == word:
                    connection.sendall(word[::-1])
                    accepted.append(1)
        except OSError:
            if listener.fileno() < 0:
                return


def _connect(
    name: str,
    address: str,
    port: int,
    word: bytes,
    until: float,
    reached: dict[str, float],
    failed: dict[str, str],
) -> None:
    """Connect to a host and read its answer; try again until the deadline."""
    why = "no answer"
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=max(0.1, until - began)) as connection:
                connection.sendall(word)
                if connection.recv(len(word)) == word[::-1]:
                    reached[name] = time.monotonic() - began
                    return
                why = "another process answers there"
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(0.1)
    failed[name] = why


def time_all_reduce(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of the fastest all-reduce over one process per host, or {"problem": why there is none}."""
    os.environ.update(asked["environment"])
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    try:
        device = torch.device("cpu")
        if asked["kind"] == "cuda":
            device = torch.device("cuda", asked["device"])
            torch.cuda.set_device(device)
        meeting = f"tcp://{asked['address']}:{asked['port']}"
        wait = timedelta(seconds=asked["seconds"] - 2)
        backend = "nccl" if asked["kind"] == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=meeting, rank=asked["rank"], world_size=asked["ranks"], timeout=wait)
        flat = torch.ones(asked["elements"], device=device)
        devices = None if asked["kind"] == "cpu" else [asked["device"]]  # else NCCL takes the one that has the number of the rank
        found = []
        for _ in range(1 + TRIES):
            dist.barrier(device_ids=devices)
            began = time.perf_counter()
            dist.all_reduce(flat)
            flat[0].item()
            found.append(time.perf_counter() - began)
        dist.barrier(device_ids=devices)
        if backend == "nccl":  # ranks also use gloo, which chooses its own interface
            dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo", timeout=wait))
    except (RuntimeError, ValueError) as error:
        return {"problem": (str(error).splitlines() or [repr(error)])[0]}
    return {"seconds": min(found[1:])}


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
