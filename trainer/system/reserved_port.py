"""A port that is reserved until it is used."""

from __future__ import annotations

import socket


def reserve_port() -> socket.socket:
    """Return a socket that reserves a free port until it is closed, on which a process of this machine can still listen.

    Linux gives a bound port to no process that asks for any port. A listener that sets SO_REUSEADDR, as torch's store does, can still
    bind it, because this socket does not listen. So only a process that asks for this very number gets it.
    """
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved
