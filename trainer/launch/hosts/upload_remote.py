"""Writes a run's files on a host: ssh runs it there by path, as `python -I -S upload_remote.py`, so it imports nothing of this package.

The files come on stdin, so that no command line shows them: {"folder": RUN_DIR, "files": {name: text}}.
It answers one JSON object a line: {"connection": SSH_CONNECTION, "name": the host's own name}, then {"written": true}
or {"problem": why not}.
Only the user can read the files. They stay if a second line on stdin is "keep", answered with {"kept": true}; at any other line, or
at the end of stdin because the controller has gone, they are removed: {"removed": true}.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys


def main() -> None:
    """Send the addresses at which the controller and this host see each other, then write the files that it sends."""
    _send({"connection": os.environ.get("SSH_CONNECTION", ""), "name": socket.gethostname()})
    text = sys.stdin.readline()
    if not text:
        return  # the controller only looked whether this host answers
    order = json.loads(text)
    written: dict[str, str] = {}
    os.umask(0o077)
    try:
        for each in ("ranks", "launch"):
            os.makedirs(os.path.join(order["folder"], each), exist_ok=True)
        for name, content in order["files"].items():
            path = os.path.join(order["folder"], name)
            if not _holds(path, content):
                _write(path, content)
                written[path] = content
    except OSError as error:
        _send({"problem": f"{order['folder']}: {error.strerror}"})
    else:
        _send({"written": True})
    if sys.stdin.readline() == '"keep"\n':
        _send({"kept": True})
        return
    for path, content in written.items():  # another host could not write, or the controller has gone
        if _holds(path, content):
            os.remove(path)
    with contextlib.suppress(OSError):
        _send({"removed": True})


def _holds(path: str, content: str) -> bool:
    """Whether the file already has this content, as in a folder that this host shares with the controller."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read() == content
    except (OSError, ValueError):
        return False


def _write(path: str, content: str) -> None:
    """Write the file atomically: another host may write the same file of a shared folder."""
    new = f"{path}.{socket.gethostname()}.{os.getpid()}"
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(new, path)
    except BaseException:
        if os.path.exists(new):
            os.remove(new)
        raise


def _send(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
