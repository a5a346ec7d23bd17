"""Compressed messages: gzip of the standard library, and zstd (extra `zstd`), which is several times faster."""

from __future__ import annotations

import functools
import importlib
import sys
import zlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, get_args

from bridge.errors import SettingError
from bridge.extras import install_command

__all__ = ["WORTHWHILE", "Compression", "Inflater", "checked_compression", "compress", "encodings", "inflater"]

Compression: TypeAlias = Literal["zstd", "gzip"]
"""How answers are compressed, by the name that gRPC has for it."""
WORTHWHILE = 1024
"""Bytes of a message from which on it is compressed."""
_LEVEL = 1
# The largest window of zstd, as a power of two: what one message may have the reader keep in memory. 8 MiB are what
# RFC 8878 asks every reader to support.
_WINDOW_LOG = 23


class Inflater(Protocol):
    """Decompresses one message in pieces."""

    @property
    def eof(self) -> bool:
        """True if the end of the compressed data was reached."""

    def take(self, data: bytes | bytearray, most: int) -> bytes:
        """Return at most `most` further bytes; `data` is the whole message at first, and empty after that.

        Raises an exception of the library where the data cannot be read.
        """


@functools.cache
def _zstd() -> Any | None:
    """Return the module of zstd, or None where there is none."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def encodings() -> tuple[str, ...]:
    """Return what messages can be compressed with here, by gRPC's names."""
    return ("deflate", "gzip") if _zstd() is None else ("deflate", "gzip", "zstd")


def checked_compression(value: Any) -> Compression | None:
    """Return a setting of compression.

    Raises:
        SettingError: There is none of that name, or its library is not installed.
    """
    if value is None:
        return None
    if value not in get_args(Compression):
        raise SettingError(f"expected compression='zstd', 'gzip' or None, got {value!r:.80}")
    if value == "zstd" and _zstd() is None:
        raise SettingError(f"compression='zstd' needs a library that is not installed: {install_command('zstd')}")
    found: Compression = value
    return found


def compress(encoding: str, parts: Sequence[bytes | memoryview]) -> bytes:
    """Return the parts of a message compressed, without its prefix.

    Args:
        encoding: One of `Compression`.
        parts: Contiguous.
    """
    zstd = _zstd()
    packer: Any
    if encoding == "zstd" and zstd is not None:
        packer = zstd.ZstdCompressor(level=_LEVEL)
    else:
        packer = zlib.compressobj(_LEVEL, wbits=zlib.MAX_WBITS | 16)
    return b"".join([*(packer.compress(part) for part in parts), packer.flush()])


def inflater(encoding: str) -> Inflater:
    """Return what decompresses one message that came with one of `encodings`."""
    zstd = _zstd()
    if encoding == "zstd" and zstd is not None:
        return _ZstdInflater(zstd)
    return _ZlibInflater()


class _ZlibInflater:
    """Decompresses gzip, or zlib's own format, which gRPC calls deflate."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)

    @property
    def eof(self) -> bool:
        return self._inflater.eof

    def take(self, data: bytes | bytearray, most: int) -> bytes:
        return self._inflater.decompress(data or self._inflater.unconsumed_tail, most)


class _ZstdInflater:
    """Decompresses one frame of zstd."""

    def __init__(self, zstd: Any) -> None:
        options = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
        self._inflater = zstd.ZstdDecompressor(options=options)

    @property
    def eof(self) -> bool:
        return bool(self._inflater.eof)

    def take(self, data: bytes | bytearray, most: int) -> bytes:
        found: bytes = self._inflater.decompress(data, most)
        return found
