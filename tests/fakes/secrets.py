"""Canaries: secrets in the environment of a run, and where one that got out is seen.

Each begins and ends with a tag that is this process's own, around what a shell would act on. The tag needs no quoting, so that one
search finds a secret that was quoted, escaped or cut; its other forms find one that was encoded.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from distrain.scripts.virtual_hosts import Host
from distrain.trainer.system.child_process import end_child

DEADLINE = 300.0  # seconds, for what takes twenty on an idle machine
PAUSE = 0.02  # seconds between two looks at all processes
LARGEST = 64 << 20  # bytes of a file outside the run's own folders that is read
TAG = f"canary{secrets.token_hex(6)}"  # nobody else's: what holds it is of these runs
ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/var/log", str(Path.home()))  # where else a run might write

# fmt: off
EVIL = {
    "WANDB_API_KEY":            "; touch {pwned} #",
    "HF_TOKEN":                 "$(touch {pwned})`touch {pwned}`",
    "MLFLOW_TRACKING_PASSWORD": "|| touch {pwned} & ${{IFS}} %h %n * ~",  # DeepSpeed's launcher pastes variables of this name
    "NCCL_PROXY_PASSWORD":      "> {pwned} <&- {{a,b}}",                  # and logs those with NCCL in it
    "AWS_SECRET_ACCESS_KEY":    "'\"\\ \t' \"touch {pwned}",
    "MY_LICENCE":               "two\nlines\r\ntouch {pwned}\n\udcff é\n" + 5000 * "=",  # not UTF-8 either
}
# fmt: on
NAMED = ("AWS_SECRET_ACCESS_KEY", "MY_LICENCE")  # by launch.environment
KEPT = "AWS_SESSION_TOKEN"  # not named: ranks on hosts are not told it
LOUD = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "NCCL_DEBUG": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "WANDB_DEBUG": "true",
}
WORDS = (
    "conf=quickstart", "model=tiny", "model.layers=1", "data=synthetic", "train.batch=4", "train.seq=16", "train.microbatch=2",
    "train.evaluate.every=0", "log.every=1", "optim.warmup=0", "train.steps=2", "name=run", f"launch.environment=[{','.join(NAMED)}]",
)  # fmt: skip


def forms(tag: bytes) -> Iterator[bytes]:
    """How the tag stands in a text that holds it: as it is (also in JSON, in quotes, after a backslash), or encoded."""
    yield from (tag, tag.hex().encode(), tag.hex().upper().encode(), tag.decode().encode("utf-16-le"))
    yield from (b"".join(form % each for each in tag) for form in (b"%%%02X", b"%%%02x", b"\\x%02x", b"\\%03o"))
    for before in range(3):  # base64 takes three bytes at a time: the letters that are the tag's alone
        first, last = -(-8 * before // 6), 8 * (before + len(tag)) // 6
        yield from (encode(bytes(before) + tag)[first:last] for encode in (b64encode, urlsafe_b64encode))


NET = re.compile(b"|".join(map(re.escape, dict.fromkeys(forms(TAG.encode())))))


def holds(text: bytes) -> bool:
    """Whether a secret is in it, in any form."""
    return NET.search(text) is not None


def environment(pwned: Path) -> dict[str, str]:
    """The secrets; a shell that acts on one of them makes the file."""
    return {name: f"{TAG}{evil.format(pwned=pwned)}{TAG}" for name, evil in {**EVIL, KEPT: "; touch {pwned}"}.items()}


def _read(path: str) -> bytes:
    """The beginning of a file of /proc, quickly."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


class Watch:
    """Looks at the command line of every process, of all hosts too, and at what is in RUN_DIR/launch, until it is closed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.lines: set[bytes] = set()
        self.ranks: dict[int, tuple[int, dict[str, str]]] = {}  # of this run: process id and environment
        self.holding: set[tuple[str, int]] = set()  # files of RUN_DIR/launch with a secret: name and mode
        self._rank = b"\0-m\0distrain.trainer.loop.rank\0" + bytes(self.run / "run.json") + b"\0"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread.is_alive()
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(PAUSE):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                self._look(int(pid))
            for file in (self.run / "launch").glob("*"):
                self._look_into(file)

    def _look(self, pid: int) -> None:
        try:
            line = _read(f"/proc/{pid}/cmdline")
            self.lines.add(line)
            if line.endswith(self._rank) and line.count(b"\0") == 4:  # its keeper's line ends so too
                rows = _read(f"/proc/{pid}/environ").split(b"\0")
                known = dict(os.fsdecode(row).split("=", 1) for row in rows if b"=" in row)
                self.ranks[int(known["RANK"])] = pid, known
        except (OSError, KeyError):
            pass  # it has ended

    def _look_into(self, file: Path) -> None:
        try:
            with file.open("rb") as opened:
                if holds(opened.read()):
                    self.holding.add((file.name, os.fstat(opened.fileno()).st_mode & 0o777))
        except OSError:
            pass  # it has gone


Act = Callable[[Watch], None]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A `distrain fit` that has ended, and what was seen of it; `folder` is RUN_DIR."""

    status: int
    said: str
    folder: Path
    watch: Watch
    handed: dict[str, str]

    def leaks(self, *folders: Path) -> Iterator[str]:
        """Where a secret is to be seen: on a command line, in what was printed, in a file of the run's or of these folders."""
        yield from (f"command line {line!r}" for line in self.watch.lines if holds(line))
        yield from (f"printed {line!r}" for line in self.said.splitlines() if holds(line.encode()))
        own = (self.folder.parent, *folders)
        yield from (str(file) for folder in own for file in folder.rglob("*") if file.is_file() and _file_holds(file))


def elsewhere(since: float, known: Path) -> Iterator[str]:
    """Files that hold a secret, of those that are newer than `since` wherever a run might write; `known` is one of them."""
    roots = [str(known), *(root for root in ELSEWHERE if Path(root).is_dir())]
    words = ["find", *roots, "-xdev", "-type", "f", "-newerct", f"@{since:.0f}", "-print0"]
    found = [Path(os.fsdecode(each)) for each in subprocess.run(words, capture_output=True).stdout.split(b"\0") if each]
    assert known in found
    yield from (str(file) for file in found if file.is_file() and file.stat().st_size <= LARGEST and _file_holds(file))


def _file_holds(file: Path) -> bool:
    try:
        return holds(bytes(file)) or holds(file.read_bytes())
    except OSError:
        return False  # another process's, which has taken it away


def fit(folder: Path, *words: str, host: Host | None = None, act: Act = lambda watch: None, more: Mapping[str, str] = LOUD) -> Fitted:
    """Run `distrain fit` with the secrets and `more` of an environment, here or on a host; `act` while it runs."""
    handed = environment(folder / "pwned")
    known = {**os.environ, **more, **handed, "HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    (folder / "home").mkdir()
    command = [sys.executable, "-m", "distrain", "fit", *WORDS, f"log.dir={folder}", *words]
    where = host.words(command) if host else command
    none, pipe, both = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    with Watch(folder / "run") as watch:
        head = subprocess.Popen(where, env=known, stdin=none, stdout=pipe, stderr=both, text=True)
        try:
            act(watch)
            said, _ = head.communicate(timeout=DEADLINE)
        finally:
            end_child(head)
    return Fitted(status=head.returncode, said=said, folder=folder / "run", watch=watch, handed=handed)
