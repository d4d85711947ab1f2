"""Streams of bytes from compressed files (.gz, .zst); a damaged or truncated file raises an error instead of reading as a shorter one."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal

Compression = Literal["", ".gz", ".zst"]
COMPRESSIONS: tuple[Compression, ...] = (".gz", ".zst")

_READ = 1 << 16  # compressed bytes per read
_DAMAGE: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
_WINDOW = 1 << 31  # bytes: the largest window of a .zst, that of zstd --long=31


class DamagedArchive(Exception):
    """A compressed file is damaged or truncated."""


def open_compressed(path: Path | str, compression: Compression) -> IO[bytes]:
    """Open a compressed file for reading; reads raise DamagedArchive, and OSError if the file itself can't be read."""
    file = open(path, "rb")  # noqa: SIM115
    return io.BufferedReader(_Stream(_Zstd(file).read if compression == ".zst" else gzip.GzipFile(fileobj=file).read1, file), 1 << 20)


def decompress_start(start: bytes, compression: Compression, most: int) -> bytes:
    """Decompress the first bytes of a file to at most `most` bytes; b"" if it is not such a file or its library is not installed."""
    if compression == ".gz":
        with suppress(zlib.error):
            return zlib.decompressobj(31).decompress(start, most)
    elif compression == ".zst":
        with suppress(ImportError, *_zstd_errors()):
            return bytes(_decompressor().decompress(start))[:most]
    return b""


class _Stream(io.RawIOBase):
    """A raw stream over a function that returns the next bytes."""

    def __init__(self, read: Callable[[int], bytes], file: IO[bytes]) -> None:
        self._read, self._file = read, file

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        try:
            found = self._read(len(into))
        except (*_zstd_errors(), *_DAMAGE) as error:
            raise DamagedArchive(str(error)) from None
        into[: len(found)] = found
        return len(found)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Zstd:
    """A reader of consecutive zstd frames; the library's own reader accepts a truncated frame as complete."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._frame, self._rest = file, None, b""
        self._ready = io.BytesIO()

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, b"" at the end; raises EOFError if a frame is truncated."""
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
