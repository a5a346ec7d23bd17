"""HPACK, the compression of HTTP/2's header fields (RFC 7541): a decoder, and an encoder that compresses nothing.

The tables are those of the RFC's appendices A and B. Its Huffman code is canonical: the lengths of the codes say
all there is to say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["Decoder", "HpackError", "encode"]

Field = tuple[str, str]

_NAMES = (
    "accept-language accept-ranges accept access-control-allow-origin age allow authorization cache-control "
    "content-disposition content-encoding content-language content-length content-location content-range "
    "content-type cookie date etag expect expires from host if-match if-modified-since if-none-match if-range "
    "if-unmodified-since last-modified link location max-forwards proxy-authenticate proxy-authorization range "
    "referer refresh retry-after server set-cookie strict-transport-security transfer-encoding user-agent vary "
    "via www-authenticate"
)
_STATIC: tuple[Field, ...] = (
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    *((":status", code) for code in ("200", "204", "206", "304", "400", "404", "500")),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    *((name, "") for name in _NAMES.split()),
)
# The code's length of each byte, and last that of the end mark.
_LENGTHS = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b080606060505"
    "050606060606060607080f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e060f050605"
    "06050606060507070606060506070605050607070707070f0b0e0d1c14161414161616171617171717171817181816171817"
    "1717171516171617171816151416161717151716161815161717151516151716171714161616171616171a1a141316171619"
    "1a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b14181415161515171616191918181a171a1b1a1a1b1b1b1b1b1c"
    "1b1b1b1b1b1a1e"
)
_END_MARK = 256
_MAX_TABLE = 4096
_OVERHEAD = 32


class HpackError(ValueError):
    """A header block that no encoder makes."""


def _codes() -> dict[tuple[int, int], int]:
    """Each symbol by its code's length and value."""
    found: dict[tuple[int, int], int] = {}
    code = 0
    before = 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(_LENGTHS)):
        code <<= length - before
        found[length, code] = symbol
        code, before = code + 1, length
    return found


_SYMBOLS = _codes()


def _unhuffman(data: bytes) -> bytes:
    out = bytearray()
    code = length = 0
    for byte in data:
        for shift in range(7, -1, -1):
            code, length = code << 1 | byte >> shift & 1, length + 1
            symbol = _SYMBOLS.get((length, code))
            if symbol is None:
                continue
            if symbol == _END_MARK:
                raise HpackError("a Huffman-coded string holds the end mark")
            out.append(symbol)
            code = length = 0
    if length > 7 or code != (1 << length) - 1:
        raise HpackError("a Huffman-coded string ends in the midst of a symbol")
    return bytes(out)


class Decoder:
    """Reads the header blocks of one connection, in order.

    Args:
        max_bytes: The most that one block's names and values may take, decoded.
    """

    def __init__(self, max_bytes: int = 65536) -> None:
        self._max_bytes = max_bytes
        self._dynamic: deque[Field] = deque()
        self._size = 0
        self._capacity = _MAX_TABLE
        self._block = b""
        self._at = 0

    def decode(self, block: bytes) -> list[Field]:
        """Return the fields of a header block.

        Raises:
            HpackError: It cannot be read; nothing that follows on the connection can.
        """
        self._block, self._at = block, 0
        fields: list[Field] = []
        total = 0
        try:
            while self._at < len(block):
                byte = block[self._at]
                if byte & 0x80:
                    field = self._field(self._integer(7))
                elif byte & 0x40:
                    field = self._literal(6)
                    self._remember(field)
                elif byte & 0x20:
                    if fields:
                        raise HpackError("the table's size changes in the midst of a block")
                    self._resize(self._integer(5))
                    continue
                else:
                    field = self._literal(4)
                fields.append(field)
                total += len(field[0]) + len(field[1]) + _OVERHEAD
                if total > self._max_bytes:
                    raise HpackError(f"the header fields take more than {self._max_bytes} bytes")
        except IndexError:
            raise HpackError("a header block ends in the midst of a field") from None
        return fields

    def _integer(self, bits: int) -> int:
        most = (1 << bits) - 1
        value = self._block[self._at] & most
        self._at += 1
        if value < most:
            return value
        for shift in range(0, 35, 7):
            byte = self._block[self._at]
            self._at += 1
            value += (byte & 0x7F) << shift
            if not byte & 0x80:
                return value
        raise HpackError("an integer is too large")

    def _text(self) -> str:
        coded = self._block[self._at] & 0x80
        length = self._integer(7)
        if length > self._max_bytes:
            raise HpackError(f"the header fields take more than {self._max_bytes} bytes")
        data = self._block[self._at : self._at + length]
        if len(data) < length:
            raise HpackError("a header block ends in the midst of a string")
        self._at += length
        return (_unhuffman(data) if coded else data).decode("latin-1")

    def _literal(self, bits: int) -> Field:
        index = self._integer(bits)
        name = self._field(index)[0] if index else self._text()
        return name, self._text()

    def _field(self, index: int) -> Field:
        if 0 < index <= len(_STATIC):
            return _STATIC[index - 1]
        if not 0 < index - len(_STATIC) <= len(self._dynamic):
            raise HpackError(f"there is no header field {index} in the table")
        return self._dynamic[index - len(_STATIC) - 1]

    def _remember(self, field: Field) -> None:
        self._dynamic.appendleft(field)
        self._size += len(field[0]) + len(field[1]) + _OVERHEAD
        self._evict()

    def _resize(self, capacity: int) -> None:
        if capacity > _MAX_TABLE:
            raise HpackError(f"a table of {capacity} bytes is larger than the {_MAX_TABLE} that were granted")
        self._capacity = capacity
        self._evict()

    def _evict(self) -> None:
        while self._size > self._capacity:
            name, value = self._dynamic.pop()
            self._size -= len(name) + len(value) + _OVERHEAD


def encode(fields: Iterable[Field]) -> bytes:
    """Return a header block whose fields are literals that no table takes in."""
    block = bytearray()
    for name, value in fields:
        block.append(0)
        for text in (name, value):
            data = text.encode("latin-1")
            block += _packed(len(data))
            block += data
    return bytes(block)


def _packed(length: int) -> bytes:
    if length < 127:
        return bytes((length,))
    out, length = bytearray((127,)), length - 127
    while length > 127:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out)
