"""The Step's request and response by hand: what is constant in them is built once, only payloads are copied.

A tensor of fixed shape has the same bytes around its elements every time, so a Step is constants with holes. A message
is read here only where every byte of every constant is as written here, and it means then what protobuf says that it
means; whatever differs in the least (another writer's order of fields, an integer of two bytes, garbage) is None, and
is left to protobuf. Written messages are ordinary ones, which any dm_env_rpc peer reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.tensors import Array, Spec

__all__ = ["StepAnswer", "StepCodec"]

# Payload member and the bytes of each element; 0: an integer from 0 to 127 as a varint of one byte.
_MEMBERS: Mapping[str, tuple[int, int]] = {
    "f4": (1, 4),
    "f8": (2, 8),
    "i1": (3, 1),
    "i4": (4, 0),
    "i8": (5, 0),
    "u1": (6, 1),
    "u4": (7, 0),
    "u8": (8, 0),
    "b1": (9, 0),
}
_BYTE = np.dtype(np.uint8)
_REQUEST_ENTRY, _RESPONSE_ENTRY = b"\x0a", b"\x12"
# From here on a payload is sent from its array instead of being copied into the message.
_LARGE = 65536


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(data: bytes | bytearray, start: int) -> tuple[int, int]:
    """Read a varint of at most five bytes; return it and where it ends, or -1 where it is none."""
    number = 0
    for index in range(5):
        if start + index >= len(data):
            return 0, -1
        byte = data[start + index]
        number |= (byte & 127) << (7 * index)
        if byte < 128:
            return number, start + index + 1
    return 0, -1


@dataclasses.dataclass(frozen=True)
class _Hole:
    """Where a tensor's elements are."""

    before: bytes
    """The constant bytes in front of it."""
    offset: int
    """Where it starts, from the first constant's start."""
    size: int
    """Bytes."""
    count: int
    """Elements."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """Of the tensor's elements."""
    stored: np.dtype[Any]
    """Of the bytes in the hole."""
    one_byte: bool
    """Whether the elements are varints, each of one byte."""
    most: int
    """The largest byte, where they are."""


class _Template:
    """Map entries of tensors, as constants and holes."""

    def __init__(self, entry: bytes, specs: Sequence[tuple[int, Spec]]) -> None:
        holes: list[_Hole] = []
        before, offset = b"", 0
        for uid, spec in specs:
            field, width = _MEMBERS[spec.dtype.str[1:]]
            count = math.prod(spec.shape)
            size = count * (width or 1)
            payload = b"\x0a" + _varint(size)
            member = bytes([field << 3 | 2]) + _varint(len(payload) + size) + payload
            dims = b"".join(map(_varint, spec.shape))
            shape = b"\x7a" + _varint(len(dims)) + dims if dims else b""
            key = b"\x08" + _varint(uid)
            tensor = len(member) + size + len(shape)
            head = key + b"\x12" + _varint(tensor)
            before += entry + _varint(len(head) + tensor) + head + member
            offset += len(before)
            stored = spec.dtype if width else _BYTE
            most = 1 if spec.dtype.kind == "b" else 127
            holes.append(_Hole(before, offset, size, count, spec.shape, spec.dtype, stored, not width, most))
            offset += size
            before = shape
        self.holes = tuple(holes)
        self.tail = before
        self.size = offset + len(before)

    @staticmethod
    def holds(specs: Sequence[tuple[int, Spec]]) -> bool:
        """Whether all of these are numbers of a fixed shape, with at least one element."""
        return all(
            spec.dtype.kind in "biuf"
            and spec.dtype.str[1:] in _MEMBERS
            and all(size > 0 for size in spec.shape)
            and 0 < uid < 1 << 63
            and math.prod(spec.shape) < 1 << 28
            for uid, spec in specs
        )

    def write(self, arrays: Sequence[Array], parts: list[bytes | memoryview]) -> bool:
        """Add the entries with these elements to `parts`; False: an array has another form."""
        for hole, array in zip(self.holes, arrays, strict=True):
            if array.dtype != hole.dtype or array.shape != hole.shape:
                return False
            parts.append(hole.before)
            if hole.one_byte and array.dtype.kind != "b":
                if hole.count == 1:
                    item = int(array.item())
                    if not 0 <= item < 128:
                        return False
                    parts.append(_SMALL[item])
                    continue
                if array.min() < 0 or array.max() > 127:
                    return False
                array = array.astype(_BYTE)
            if hole.size >= _LARGE and array.flags.c_contiguous:
                parts.append(array.data.cast("B"))
            else:
                parts.append(array.tobytes())
        parts.append(self.tail)
        return True

    def matches(self, data: bytes | bytearray, start: int) -> bool:
        """Whether the entries are in `data`, from `start` on, to the byte."""
        for hole in self.holes:
            offset = start + hole.offset
            if not data.startswith(hole.before, offset - len(hole.before)):
                return False
            if hole.one_byte and hole.count == 1:
                if data[offset] > hole.most:
                    return False
            elif hole.one_byte:
                stored = data[offset : offset + hole.size]
                # A byte from 128 on would belong to a longer varint, and a bool is 0 or 1 when written by anybody sane.
                if not stored.isascii() or (hole.dtype.kind == "b" and stored.translate(None, b"\0\1")):
                    return False
        return data.startswith(self.tail, start + self.size - len(self.tail))

    def read(self, data: bytes | bytearray, start: int) -> list[Array]:
        """Return the tensors of a match; they may share its memory."""
        found: list[Array] = []
        for hole in self.holes:
            array: Array = np.frombuffer(data, hole.stored, hole.count, start + hole.offset)
            if hole.one_byte:
                array = array.view(hole.dtype) if hole.dtype.kind == "b" else array.astype(hole.dtype)
            found.append(array.reshape(hole.shape))
        return found


_SMALL = tuple(bytes([number]) for number in range(128))


class StepAnswer:
    """A Step's response that was matched: its bytes, and where what is in them."""

    __slots__ = ("data", "info", "start", "state")

    def __init__(self, data: bytes | bytearray, start: int, state: int, info: bytes | None) -> None:
        self.data, self.start, self.state, self.info = data, start, state, info


class StepCodec:
    """Writes and reads the Steps of one agent that always asks for the same observations.

    Args:
        actions: The actions' UIDs and specs, in the order in which they are written.
        observations: The observations' UIDs and specs, in the order in which they are requested; the last may be the
            one of shape `(-1,)` and type uint8 that the info is.
    """

    def __init__(self, actions: Sequence[tuple[int, Spec]], observations: Sequence[tuple[int, Spec]]) -> None:
        wanted = [uid for uid, _ in observations]
        self.first = pb.EnvironmentRequest(step=pb.StepRequest(requested_observations=wanted)).SerializeToString()
        """The Step without actions, by which a sequence begins."""
        self._info_uid = 0
        if observations and observations[-1][1].shape == (-1,):
            self._info_uid = observations[-1][0]
            observations = observations[:-1]
        self._actions = _Template(_REQUEST_ENTRY, actions)
        self._observations = _Template(_RESPONSE_ENTRY, observations)
        # Two serialized messages in a row are their merged one.
        self._request_head = self.first + b"\x1a" + _varint(self._actions.size)
        self._request_size = len(self._request_head) + self._actions.size
        self._last_info = (b"", self._write_info(b""))

    @classmethod
    def make(cls, actions: Sequence[tuple[int, Spec]], observations: Sequence[tuple[int, Spec]]) -> StepCodec | None:
        """Return a codec, or None where a tensor varies in size or holds no numbers."""
        fixed = observations
        if observations and observations[-1][1].shape == (-1,) and observations[-1][1].dtype == _BYTE:
            fixed = observations[:-1]
        if not fixed or not actions or not _Template.holds(fixed) or not _Template.holds(actions):
            return None
        if not 0 < observations[-1][0] < 1 << 63:
            return None
        return cls(actions, observations)

    @property
    def has_info(self) -> bool:
        """Whether the last observation is the info."""
        return self._info_uid > 0

    def write_request(self, arrays: Sequence[Array]) -> bytes | None:
        """Return the Step with these actions; None: one has no fixed size, such as an integer over 127."""
        parts: list[bytes | memoryview] = [self._request_head]
        return b"".join(parts) if self._actions.write(arrays, parts) else None

    def read_request(self, data: bytes | bytearray) -> list[Array] | None:
        """Return the actions of a Step, sharing memory with `data`; None: protobuf must read it."""
        if len(data) != self._request_size or not data.startswith(self._request_head):
            return None
        start = len(self._request_head)
        return self._actions.read(data, start) if self._actions.matches(data, start) else None

    def write_response(
        self, state: int, arrays: Sequence[Array], info: bytes | None
    ) -> list[bytes | memoryview] | None:
        """Return a response in parts, large ones sharing memory with the arrays; None: protobuf must write it."""
        parts: list[bytes | memoryview] = [b""]
        if not self._observations.write(arrays, parts):
            return None
        size = 2 + self._observations.size
        if self._info_uid:
            known, entry = self._last_info
            if info != known:
                entry = self._write_info(info or b"")
                self._last_info = (info or b"", entry)
            parts.append(entry)
            size += len(entry)
        parts[0] = b"\x1a" + _varint(size) + b"\x08" + _SMALL[state]
        return parts

    def _write_info(self, info: bytes) -> bytes:
        payload = b"\x0a" + _varint(len(info)) + info if info else b""
        dims = _varint(len(info))
        tensor = b"\x32" + _varint(len(payload)) + payload + b"\x7a" + _varint(len(dims)) + dims
        body = b"\x08" + _varint(self._info_uid) + b"\x12" + _varint(len(tensor)) + tensor
        return _RESPONSE_ENTRY + _varint(len(body)) + body

    def read_response(self, data: bytes | bytearray) -> StepAnswer | None:
        """Match a response; None: protobuf must read it."""
        if not data.startswith(b"\x1a"):
            return None
        size, start = _read_varint(data, 1)
        if start < 0 or start + size != len(data) or size < 2 + self._observations.size or data[start] != 8:
            return None
        state = data[start + 1]
        start += 2
        if not 1 <= state <= 3 or not self._observations.matches(data, start):
            return None
        stop = start + self._observations.size
        if not self._info_uid:
            return StepAnswer(data, start, state, None) if stop == len(data) else None
        rest = bytes(memoryview(data)[stop:])
        known, entry = self._last_info
        if rest != entry:
            found = self._read_info(rest)
            if found is None:
                return None
            known = found
            self._last_info = (found, rest)
        return StepAnswer(data, start, state, known)

    def _read_info(self, rest: bytes) -> bytes | None:
        """Read the last entry; by protobuf, whose reading is kept if it would be written so again."""
        try:
            observations = pb.StepResponse.FromString(rest).observations
        except (DecodeError, ValueError):
            return None
        if len(observations) != 1 or self._info_uid not in observations:
            return None
        info = observations[self._info_uid].uint8s.array
        return info if self._write_info(info) == rest else None

    def arrays(self, answer: StepAnswer) -> list[Array]:
        """Return the observations of a match, but for the info; they may share its memory."""
        return self._observations.read(answer.data, answer.start)
