"""Canaries: secrets in the environment of a run, and a search for any that leaked.

Each begins and ends with a tag that is unique to this process, around text that a shell would act on. The tag needs no quoting, so one
search finds a secret that was quoted, escaped or cut; searches for its encoded forms find one that was encoded.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from distrain.scripts.virtual_hosts import VirtualHost
from distrain.tests.fakes.deadline import DEADLINE
from distrain.trainer.system.child_process import end_child

PAUSE = 0.02  # seconds between two scans of all processes
LARGEST = 64 << 20  # bytes; larger files outside the run's own folders are not searched
TAG = f"canary{secrets.token_hex(6)}"  # unique: text that contains it comes from these runs
ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/var/log", str(Path.home()))  # where else a run might write

# fmt: off
HOSTILE_VALUES = {
    "WANDB_API_KEY":            "; touch {pwned} #",
    "HF_TOKEN":                 "$(touch {pwned})`touch {pwned}`",
    "MLFLOW_TRACKING_PASSWORD": "|| touch {pwned} & ${{IFS}} %h %n * ~",  # DeepSpeed's launcher pastes variables of this name
    "NCCL_PROXY_PASSWORD":      "> {pwned} <&- {{a,b}}",                  # and logs those with NCCL in it
    "AWS_SECRET_ACCESS_KEY":    "'\"\\ \t' \"touch {pwned}",
    "MY_LICENCE":               "two\nlines\r\ntouch {pwned}\n\udcff é\n" + 5000 * "=",  # not UTF-8 either
}
# fmt: on
NAMED = ("AWS_SECRET_ACCESS_KEY", "MY_LICENCE")  # in launch.environment
UNNAMED = "AWS_SESSION_TOKEN"  # not in launch.environment: not forwarded to other hosts
VERBOSE = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "NCCL_DEBUG": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "WANDB_DEBUG": "true",
}
ARGUMENTS = (
    "conf=quickstart", "model=tiny", "model.layers=1", "data=synthetic", "train.batch=4", "train.seq=16", "train.microbatch=2",
    "train.evaluate.every=0", "log.every=1", "optim.warmup=0", "train.steps=2", "name=run", f"launch.environment=[{','.join(NAMED)}]",
)  # fmt: skip


def encoded_forms(tag: bytes) -> Iterator[bytes]:
    """Yield the forms of the tag in a text that contains it: as it is (also in JSON, in quotes, after a backslash), or encoded."""
    yield from (tag, tag.hex().encode(), tag.hex().upper().encode(), tag.decode().encode("utf-16-le"))
    yield from (b"".join(form % each for each in tag) for form in (b"%%%02X", b"%%%02x", b"\\x%02x", b"\\%03o"))
    for before in range(3):  # base64 takes three bytes at a time: the letters that are the tag's alone
        first, last = -(-8 * before // 6), 8 * (before + len(tag)) // 6
        yield from (encode(bytes(before) + tag)[first:last] for encode in (b64encode, urlsafe_b64encode))


SECRET = re.compile(b"|".join(map(re.escape, dict.fromkeys(encoded_forms(TAG.encode())))))


def has_secret(text: bytes) -> bool:
    """Return whether a text contains a secret in any form."""
    return SECRET.search(text) is not None


def secret_variables(pwned: Path) -> dict[str, str]:
    """Return the secrets; a shell that acts on one of them creates the file `pwned`."""
    return {name: f"{TAG}{value.format(pwned=pwned)}{TAG}" for name, value in {**HOSTILE_VALUES, UNNAMED: "; touch {pwned}"}.items()}


def _read(path: str) -> bytes:
    """Return the beginning of a file in /proc; faster than Path.read_bytes."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _processes() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


class Watch:
    """Scans the command line of every process that starts meanwhile, including those of virtual hosts, and the files in RUN_DIR/launch,
    until it is closed."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.command_lines: set[bytes] = set()
        self.ranks: dict[int, tuple[int, dict[str, str]]] = {}  # by rank of this run: process id and environment
        self.secret_files: set[tuple[str, int]] = set()  # (name, mode) of files in RUN_DIR/launch that contain a secret
        self._rank_line = b"\0-m\0distrain.trainer.loop.rank\0" + bytes(self.run / "run.json") + b"\0"
        self._before = _processes()  # they are not the run's, and most are the kernel's
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
            now = _processes()
            self._before &= now  # another process may be given the number of one that has ended
            for pid in now - self._before:
                self._scan_process(pid)
            with suppress(OSError):  # the folder may be removed meanwhile
                for file in (self.run / "launch").iterdir():
                    self._scan_file(file)

    def _scan_process(self, pid: int) -> None:
        try:
            line = _read(f"/proc/{pid}/cmdline")
            self.command_lines.add(line)
            if line.endswith(self._rank_line) and line.count(b"\0") == 4:  # its agent's command line has the same end
                rows = _read(f"/proc/{pid}/environ").split(b"\0")
                variables = dict(os.fsdecode(row).split("=", 1) for row in rows if b"=" in row)
                self.ranks[int(variables["RANK"])] = pid, variables
        except (OSError, KeyError):
            pass  # it has ended

    def _scan_file(self, file: Path) -> None:
        try:
            with file.open("rb") as content:
                if has_secret(content.read()):
                    self.secret_files.add((file.name, os.fstat(content.fileno()).st_mode & 0o777))
        except OSError:
            pass  # it was removed


Act = Callable[[Watch], None]


@dataclass(frozen=True, kw_only=True)
class FitRun:
    """A `distrain fit` that has ended, its output, and what was seen of it; `folder` is RUN_DIR, `secrets` its secret variables."""

    status: int
    output: str
    folder: Path
    watch: Watch
    secrets: dict[str, str]

    def leaks(self, *folders: Path) -> Iterator[str]:
        """Yield where a secret was seen: in a command line, in the output, in a file of the run or of these folders."""
        yield from (f"command line {line!r}" for line in self.watch.command_lines if has_secret(line))
        yield from (f"printed {line!r}" for line in self.output.splitlines() if has_secret(line.encode()))
        own = (self.folder.parent, *folders)
        yield from (str(file) for folder in own for file in folder.rglob("*") if file.is_file() and _file_has_secret(file))


def secret_files_elsewhere(since: float, known: Path) -> Iterator[str]:
    """Yield the files newer than `since`, anywhere that a run might write, that contain a secret; `known` is one of the newer files."""
    roots = [str(known), *(root for root in ELSEWHERE if Path(root).is_dir())]
    command = ["find", *roots, "-xdev", "-type", "f", "-newerct", f"@{since:.0f}", "-print0"]
    found = [Path(os.fsdecode(each)) for each in subprocess.run(command, capture_output=True).stdout.split(b"\0") if each]
    assert known in found
    yield from (str(file) for file in found if file.is_file() and _file_has_secret(file, LARGEST))


def _file_has_secret(file: Path, largest: int = sys.maxsize) -> bool:
    """Return whether a file of at most `largest` bytes has a secret in its path or its content."""
    try:
        return has_secret(bytes(file)) or (file.stat().st_size <= largest and has_secret(file.read_bytes()))
    except OSError:
        return False  # another process has removed it


def fit(
    folder: Path, *overrides: str, host: VirtualHost | None = None, act: Act = lambda watch: None, variables: Mapping[str, str] = VERBOSE
) -> FitRun:
    """Run `distrain fit` with the secrets and `variables` in its environment, here or on a host; call `act` while it runs."""
    hidden = secret_variables(folder / "pwned")
    full = {**os.environ, **variables, **hidden, "HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    (folder / "home").mkdir()
    command = [sys.executable, "-m", "distrain", "fit", *ARGUMENTS, f"log.dir={folder}", *overrides]
    argv = host.command_line(command) if host else command
    none, pipe, both = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    with Watch(folder / "run") as watch:
        controller = subprocess.Popen(argv, env=full, stdin=none, stdout=pipe, stderr=both, text=True)
        try:
            act(watch)
            output, _ = controller.communicate(timeout=DEADLINE)
        finally:
            end_child(controller)
    return FitRun(status=controller.returncode, output=output, folder=folder / "run", watch=watch, secrets=hidden)
