"""Packed files (.gz, .zst) are read as streams of bytes, and one that is damaged or cut short is never read as a shorter one."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal

Packing = Literal["", ".gz", ".zst"]
PACKED: tuple[Packing, ...] = (".gz", ".zst")

_READ = 1 << 16  # packed bytes at a time
_DAMAGE: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
_WINDOW = 1 << 31  # bytes that a .zst may refer back to: all that zstd --long=31 writes


class DamagedFile(Exception):
    """What is wrong with a packed file."""


def open_packed(path: Path | str, packing: Packing) -> IO[bytes]:
    """What a packed file holds; reading raises DamagedFile, and OSError where the file itself can't be read."""
    file = open(path, "rb")  # noqa: SIM115
    return io.BufferedReader(_Stream(_Zstd(file).read if packing == ".zst" else gzip.GzipFile(fileobj=file).read1, file), 1 << 20)


def unpack_start(start: bytes, packing: Packing, most: int) -> bytes:
    """At most so many bytes of what the first bytes of a packed file hold, where its library is installed; b"" of no such file."""
    if packing == ".gz":
        with suppress(zlib.error):
            return zlib.decompressobj(31).decompress(start, most)
    elif packing == ".zst":
        with suppress(ImportError, *_zstd_errors()):
            return bytes(_decompressor().decompress(start))[:most]
    return b""


class _Stream(io.RawIOBase):
    """A function that gives the next so many bytes, as a raw stream."""

    def __init__(self, read: Callable[[int], bytes], file: IO[bytes]) -> None:
        self._read, self._file = read, file

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        try:
            found = self._read(len(into))
        except (*_zstd_errors(), *_DAMAGE) as error:
            raise DamagedFile(str(error)) from None
        into[: len(found)] = found
        return len(found)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Zstd:
    """Frames of zstd one after another; the library's own reader takes a frame that was cut short for a whole one."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._frame, self._rest = file, None, b""
        self._ready = io.BytesIO()

    def read(self, size: int) -> bytes:
        """At most so many bytes, b"" at the end; raises EOFError where a frame is cut short."""
        while not (found := self._ready.read(size)):
            packed = self._rest or self._file.read(_READ)
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return b""
            self._ready = io.BytesIO(self._step(packed))
        return found

    def _step(self, packed: bytes) -> bytes:
        frame = self._frame if self._frame is not None else _decompressor()
        found = bytes(frame.decompress(packed))
        self._frame, self._rest = (None, frame.unused_data) if frame.eof else (frame, b"")
        return found


def _decompressor() -> Any:
    return import_module("zstandard").ZstdDecompressor(max_window_size=_WINDOW).decompressobj()


def _zstd_errors() -> tuple[type[Exception], ...]:
    with suppress(ImportError):
        return (import_module("zstandard").ZstdError,)
    return ()
