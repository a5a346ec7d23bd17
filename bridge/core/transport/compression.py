"""Compressed messages: gzip of the standard library, and zstd (extra `zstd`), which is several times faster."""

from __future__ import annotations

import functools
import importlib
import sys
import zlib
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

from bridge.core.extras import install_command
from bridge.errors import SettingError

__all__ = ["WORTHWHILE", "Compression", "Inflater", "checked_compression", "compress", "encodings"]

Compression: TypeAlias = Literal["zstd", "gzip"]
"""How answers are compressed, by the name that gRPC has for it."""
WORTHWHILE = 1024
"""Bytes of a message from which on it is compressed."""
_LEVEL = 1
# The largest window of zstd, as a power of two: what one message may have the reader keep in memory. 8 MiB are what
# RFC 8878 asks every reader to support.
_WINDOW_LOG = 23
_PIECE = 1 << 20


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
    return cast(Compression, value)


def compress(encoding: str, parts: Sequence[bytes | memoryview]) -> bytes:
    """Return the parts of a message compressed, without its prefix.

    Args:
        encoding: One of `Compression`.
        parts: Contiguous.
    """
    zstd = _zstd() if encoding == "zstd" else None
    wbits = zlib.MAX_WBITS | 16  # 16: gzip's header and trailer
    packer: Any = zlib.compressobj(_LEVEL, wbits=wbits) if zstd is None else zstd.ZstdCompressor(level=_LEVEL)
    return b"".join([*(packer.compress(part) for part in parts), packer.flush()])


class Inflater:
    """Decompresses one message in pieces: gzip, zlib's own format, which gRPC calls deflate, or one frame of zstd.

    Args:
        encoding: One of `encodings`.
    """

    def __init__(self, encoding: str) -> None:
        self._rest = memoryview(b"")
        self._inner: Any = zlib.decompressobj(zlib.MAX_WBITS | 32)  # 32: gzip or zlib, by how the data begins
        if encoding == "zstd" and (zstd := _zstd()) is not None:
            self._inner = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG})

    @property
    def eof(self) -> bool:
        """True if the end of the compressed data was reached."""
        return bool(self._inner.eof)

    def take(self, data: bytes | bytearray, most: int) -> bytes:
        """Return at most `most` further bytes; `data` is the whole message at first, and empty after that.

        Raises an exception of the library where the data cannot be read.
        """
        if data:
            self._rest = memoryview(data)
        parts: list[bytes] = []
        while most and not self.eof:
            # zlib hands back a copy of what it has not looked at: for each MiB all of a message, were it given as one.
            piece = getattr(self._inner, "unconsumed_tail", b"")
            if not piece:
                piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:]
            parts.append(self._inner.decompress(piece, most))
            most -= len(parts[-1])
            if not (piece or parts[-1]):
                break
        return b"".join(parts)
