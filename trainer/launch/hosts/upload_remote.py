"""Writes a run's files on a host: ssh runs it there by path, as `python -I -S upload_remote.py`, and it imports nothing of this package.

What it is to write comes on stdin, so that nothing of it is seen on a command line: {"folder": RUN_DIR, "files": {name: text}}.
It answers a JSON object a line: {"connection": what SSH_CONNECTION says, "name": what the host calls itself}, then {"written": true}
or {"problem": why not}.
Files are its user's alone. What it wrote stays if a second line on stdin is "keep", answered with {"kept": true}; anything else, or
the end of stdin because the head has gone, has it removed: {"removed": true}.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys


def main() -> None:
    """Say by which addresses the head and this host see each other, then write what it sends."""
    _tell({"connection": os.environ.get("SSH_CONNECTION", ""), "name": socket.gethostname()})
    text = sys.stdin.readline()
    if not text:
        return  # the head has no use for this host
    order = json.loads(text)
    written: dict[str, str] = {}
    os.umask(0o077)
    try:
        for each in ("ranks", "launch"):
            os.makedirs(os.path.join(order["folder"], each), exist_ok=True)
        for name, content in order["files"].items():
            path = os.path.join(order["folder"], name)
            if not _has(path, content):
                _write(path, content)
                written[path] = content
    except OSError as error:
        _tell({"problem": f"{order['folder']}: {error.strerror}"})
    else:
        _tell({"written": True})
    if sys.stdin.readline() == '"keep"\n':
        _tell({"kept": True})
        return
    for path, content in written.items():  # another host could not write, or the head is no more
        if _has(path, content):
            os.remove(path)
    with contextlib.suppress(OSError):
        _tell({"removed": True})


def _has(path: str, content: str) -> bool:
    """Whether it is there already, as in a folder that this host shares with the head."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read() == content
    except (OSError, ValueError):
        return False


def _write(path: str, content: str) -> None:
    """Whole or not at all: another host may write the same file of a shared folder."""
    new = f"{path}.{socket.gethostname()}.{os.getpid()}"
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(new, path)
    except BaseException:
        if os.path.exists(new):
            os.remove(new)
        raise


def _tell(words: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
