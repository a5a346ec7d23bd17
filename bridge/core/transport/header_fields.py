"""Header fields of HTTP/2: assemble their frames, decompress them with the `hpack` library, and check them.

The checks are those of RFC 9113, sections 8.2 and 8.3.
"""

from __future__ import annotations

import logging
import re

import hpack

from bridge.core.transport.frames import ErrorCode, Fields, Http2Error, Setting

__all__ = ["HeaderReader", "HeaderWriter", "MalformedHeadersError", "check_fields"]

logging.getLogger("hpack").setLevel(logging.INFO)  # it would log every header field, and so tokens

# The most CONTINUATION frames of a block. A server also accounts for a client's processor time. But a client, which
# reads a server's frames with the same code, has no account: endless empty frames would keep it busy.
_MAX_CONTINUATIONS = 64
# HPACK's default, which `hpack` itself observes for decoding. Peers may offer larger tables, but each takes memory for
# the lifetime of its connection.
_MAX_TABLE = 4096
_NAME = re.compile(r":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(r"[\0\r\n]|^[ \t]|[ \t]$")
_BAD_RESPONSE_VALUE = re.compile(r"[\0\r\n]")
_OF_A_CONNECTION = frozenset(("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"))
_REQUEST = frozenset((":method", ":scheme", ":path", ":authority"))
_RESPONSE = frozenset((":status",))
# Fields that may appear once: readers would choose between two different values in different ways.
_ONCE = frozenset(("authorization", "content-length", "content-type", "host"))
_SECRET = frozenset(("authorization", "cookie"))


class MalformedHeadersError(Exception):
    """Header fields are not valid in a request or response; the stream is reset."""


class HeaderReader:
    """Reads the header blocks of one connection, in order.

    Args:
        max_bytes: The most bytes of one block, and of its decompressed fields, as SETTINGS_MAX_HEADER_LIST_SIZE counts
            them.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.number: int | None = None
        """The stream of an incomplete block; None: there is none."""
        self.end_stream = False
        """True if that block ends its stream."""
        self._block = bytearray()
        self._continuations = 0
        self._decoder = hpack.Decoder(max_header_list_size=max_bytes)

    def begin(self, number: int, fragment: bytes, *, end_stream: bool) -> None:
        """Add the first fragment of a block. Raises Http2Error if it is too large."""
        self.number, self.end_stream = number, end_stream
        self._block, self._continuations = bytearray(), 0
        self._add(fragment)

    def go_on(self, fragment: bytes) -> None:
        """Add another fragment. Raises Http2Error if there are too many, or they are too large together."""
        self._continuations += 1
        if self._continuations > _MAX_CONTINUATIONS:
            raise Http2Error(f"a header block of more than {_MAX_CONTINUATIONS} frames", ErrorCode.ENHANCE_YOUR_CALM)
        self._add(fragment)

    def _add(self, fragment: bytes) -> None:
        self._block += fragment
        if len(self._block) > self.max_bytes:
            raise Http2Error(f"a header block of more than {self.max_bytes} bytes", ErrorCode.ENHANCE_YOUR_CALM)

    def finish(self) -> list[tuple[str, str]]:
        """Return the fields of the complete block.

        Raises:
            Http2Error: The block cannot be read, nor can any later one on the connection.
        """
        block, self._block, self.number = bytes(self._block), bytearray(), None
        try:
            fields = self._decoder.decode(block, raw=True)
            # Values may hold any bytes. Latin-1 decodes all of them; UTF-8 would raise an error that is not HPACK's.
            return [(str(name, "latin-1"), str(value, "latin-1")) for name, value in fields]
        except hpack.OversizedHeaderListError as error:
            raise Http2Error(
                f"header fields of more than {self.max_bytes} bytes", ErrorCode.ENHANCE_YOUR_CALM
            ) from error
        except hpack.HPACKError as error:
            raise Http2Error(
                f"header fields that cannot be decompressed: {error}", ErrorCode.COMPRESSION_ERROR
            ) from error
        except (IndexError, ValueError, OverflowError) as error:  # a block that ends in the middle of a field
            raise Http2Error("a header block that ends in the midst of a field", ErrorCode.COMPRESSION_ERROR) from error


class HeaderWriter:
    """Writes the header blocks of one connection. A block must be sent before the next one is written."""

    def __init__(self) -> None:
        self._encoder = hpack.Encoder()
        # The next block must begin with both (RFC 7541, 4.2). `hpack` would store every change until then, so a peer
        # that sends endless settings would fill the memory.
        self._table: tuple[int, int] | None = None
        """The smallest table size that the peer has asked for since the last block, and the latest."""

    def setting_changed(self, key: int, value: int) -> None:
        """Note a changed setting of the peer."""
        if key == Setting.HEADER_TABLE_SIZE:
            size = min(value, _MAX_TABLE)
            self._table = min(size, self._table[0]) if self._table is not None else size, size

    def pack(self, fields: Fields) -> bytes:
        """Return a header block."""
        if self._table is not None:
            for size in self._table:
                if size != self._encoder.header_table_size:
                    self._encoder.header_table_size = size
            self._table = None
        items = [
            # Never indexed, so that proxies do not compress secrets either: the size of compressed fields can reveal
            # them (RFC 7541, 7.1).
            (hpack.NeverIndexedHeaderTuple if name in _SECRET else hpack.HeaderTuple)(
                name.encode("latin-1"), value.encode("latin-1")
            )
            for name, value in fields
        ]
        # Huffman codes would save 30 of 125 bytes a call, and double the time at both ends: 70 µs to write, 91 to read.
        return bytes(self._encoder.encode(items, huffman=False))


def check_fields(fields: list[tuple[str, str]], *, request: bool, trailers: bool) -> dict[str, str]:
    """Return header fields by name; the values of a repeated name are joined.

    Args:
        fields: The decompressed fields.
        request: True if they came from a client.
        trailers: True if they are trailers.

    Raises:
        MalformedHeadersError: They break a rule of RFC 9113, section 8.2 or 8.3.
    """
    allowed = frozenset[str]() if trailers else _REQUEST if request else _RESPONSE
    bad_value = _BAD_VALUE if request else _BAD_RESPONSE_VALUE
    found: dict[str, str] = {}
    regular = False
    for name, value in fields:
        if not _NAME.fullmatch(name):
            raise MalformedHeadersError(f"the name of a header field is not of lower-case letters: {name!r:.80}")
        if bad_value.search(value):
            raise MalformedHeadersError(f"the header field {name!r:.80} has a line end, NUL or blank where none may be")
        if name[0] == ":":
            # Pseudo-header fields come first, and once each (RFC 9113, 8.3).
            if regular or name in found or name not in allowed:
                raise MalformedHeadersError(f"the pseudo-header field {name!r:.80} stands where it may not")
        else:
            regular = True
            # HTTP/2 forbids them (RFC 9113, 8.2.2): forwarded over HTTP/1.1, they would change where a request ends.
            if name in _OF_A_CONNECTION or (name == "te" and value.lower() != "trailers"):
                raise MalformedHeadersError(f"the header field {name!r} is not for HTTP/2")
        if name not in found:
            found[name] = value
        elif name in _ONCE and found[name] != value:
            raise MalformedHeadersError(f"the header field {name!r} came twice, with different values")
        elif name not in _ONCE:
            # HTTP/2 splits a cookie into several fields, to compress them (RFC 9113, 8.2.3).
            found[name] += ("; " if name == "cookie" else ", ") + value
    length = found.get("content-length", "0")
    # `isdigit` alone accepts digits of other scripts, and `int` refuses more than 4300 digits.
    if not (length.isascii() and length.isdigit() and len(length) < 19):
        raise MalformedHeadersError(f"expected content-length to be a number, got {length!r:.40}")
    if not trailers:
        _check_pseudo_fields(found, request)
    return found


def _check_pseudo_fields(found: dict[str, str], request: bool) -> None:
    if not request:
        status = found.get(":status", "")
        if len(status) != 3 or not status.isascii() or not status.isdigit():
            raise MalformedHeadersError(f"expected :status of three digits, got {status!r:.40}")
        return
    method = found.get(":method", "")
    if not method:
        raise MalformedHeadersError("the request has no :method")
    if method == "CONNECT":
        if ":scheme" in found or ":path" in found or not found.get(":authority"):
            raise MalformedHeadersError("expected CONNECT with :authority alone")
    elif not found.get(":scheme") or not found.get(":path"):
        raise MalformedHeadersError("the request has no :scheme or no :path")
    # `*` is for OPTIONS (RFC 9113, 8.3.1).
    elif found[":path"][0] != "/" and found[":path"] != "*":
        raise MalformedHeadersError(f"expected a :path that begins with a slash, got {found[':path']!r:.80}")
    # A proxy may have checked one of them, and a server may use the other (RFC 9113, 8.3.1).
    if "host" in found and found.get(":authority", found["host"]) != found["host"]:
        raise MalformedHeadersError("host and :authority differ")
