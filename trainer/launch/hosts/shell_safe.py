"""Text that may stand on a remote shell's command line unquoted, and the options of every ssh that we start."""

from __future__ import annotations

import re

from ...spec.problem import Problem, Unreadable

_UNSAFE = re.compile(r"[^A-Za-z0-9._/=:-]")
SAFE_CHARACTERS = "letters, digits and . _ / = : -"

# ssh never asks a question, gives up on a host that does not answer, and notices a connection that was cut.
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


def require_shell_safe(text: str, what: str, mend: str) -> str:
    """Return `text` if a remote shell reads it as one plain word; raises Unreadable otherwise, calling it `what`."""
    odd = _UNSAFE.search(text)
    if odd:
        says = f"{what} {text} contains {odd[0]!r}, and only {SAFE_CHARACTERS} can be sent to other hosts"
        raise Unreadable([Problem(rule="words", says=says, mend=mend)])
    if not text or text.startswith("-"):
        raise Unreadable([Problem(rule="words", says=f"{what} {text or '(empty)'} can't be sent to other hosts", mend=mend)])
    return text
