"""A fast path for Step requests and responses that bypasses protobuf.

If all tensors have a fixed shape, the bytes around their elements are the same in every Step. So a message is built
from constant bytes with holes for the elements. A received message is read here only if all its constant bytes match.
Otherwise (another order of fields, an integer of two bytes, garbage) the functions return None and the caller uses
protobuf. Written messages are ordinary protobuf, which any dm_env_rpc peer can read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.core.encoding.tensors import FEW, Array, Spec, pack_varint
from bridge.core.encoding.values import read_varint
from bridge.errors import TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["StepAnswer", "StepCodec"]

# Payload member and the bytes of each element; 0: an integer from 0 to 127 as a varint of one byte.
# An integer of 128 or more takes several bytes, and shifts everything behind it: protobuf then writes the message.
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
_ARRAYS = (np.ndarray, np.generic)
_REQUEST_ENTRY, _RESPONSE_ENTRY = b"\x0a", b"\x12"
# A payload of this size or more is sent from its array instead of being copied into the message.
_LARGE = 65536
# For more elements than this, the methods of bytes are faster than a regular expression.
_MANY = 32
# The number of length fields in the entry of an info.
_LENGTHS = 6
_SMALL = tuple(bytes([number]) for number in range(128))
_RUNNING = pb.RUNNING


@dataclasses.dataclass(frozen=True)
class _Hole:
    """The place of a tensor's elements in a message."""

    before: bytes
    """The constant bytes in front of it."""
    offset: int
    """The offset of the hole from the start of the first constant."""
    size: int
    """The size in bytes."""
    count: int
    """The number of elements."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """The dtype of the tensor's elements."""
    stored: np.dtype[Any]
    """The dtype of the bytes in the hole."""
    one_byte: bool
    """True if the elements are varints, each of one byte."""
    most: int
    """The largest value of a byte, if the elements are varints."""
    scalar: str
    """The `struct` format that packs a Python float or bool as the hole's bytes; "": the tensor is no such scalar."""

    def array(self, data: bytes | bytearray, start: int) -> Array:
        """Return the tensor, given the position of the first constant; it may share memory with `data`."""
        array: Array = np.ndarray(self.shape, self.stored, data, start + self.offset)
        return array if self.stored is self.dtype else array.astype(self.dtype)


# Scalars that are written from and read as Python's own float or bool. The reward and the flags are such scalars: no
# arrays are made for them.
_SCALARS: Mapping[str, str] = {np.dtype("<f8").str: "d", np.dtype(np.bool_).str: "?"}


class _Template:
    """Map entries of tensors, as constants and holes."""

    def __init__(self, entry: bytes, specs: Sequence[tuple[int, Spec]]) -> None:
        holes: list[_Hole] = []
        before, offset = b"", 0
        for uid, spec in specs:
            # An entry has `entry` and its length; the key (08, the UID); the value (12, its length), a Tensor. The
            # tensor has the payload (tag, length; 0A, length, elements) and, unless it is (), the shape. Protobuf
            # writes this order.
            field, width = _MEMBERS[spec.dtype.str[1:]]
            count = math.prod(spec.shape)
            size = count * (width or 1)
            payload = b"\x0a" + pack_varint(size)
            member = bytes([field << 3 | 2]) + pack_varint(len(payload) + size) + payload
            dims = b"".join(map(pack_varint, spec.shape))
            shape = b"\x7a" + pack_varint(len(dims)) + dims if dims else b""
            key = b"\x08" + pack_varint(uid)
            tensor = len(member) + size + len(shape)
            head = key + b"\x12" + pack_varint(tensor)
            before += entry + pack_varint(len(head) + tensor) + head + member
            offset += len(before)
            stored = spec.dtype if width or spec.dtype.kind == "b" else _BYTE
            most = 1 if spec.dtype.kind == "b" else 127
            scalar = _SCALARS.get(spec.dtype.str, "") if spec.shape == () else ""
            holes.append(_Hole(before, offset, size, count, spec.shape, spec.dtype, stored, not width, most, scalar))
            offset += size
            before = shape
        self.holes = tuple(holes)
        # In the order in which `write` uses them, because each attribute look-up costs time.
        self._arrays = [
            (index, hole.dtype, hole.shape, hole.stored is not hole.dtype, hole.size >= _LARGE, hole)
            for index, hole in enumerate(holes)
            if not hole.scalar
        ]
        self._pieces = _pieces(holes, before)
        self.has_large = len(self._pieces) > 1
        """True if a tensor is large: it is sent from its own memory."""
        # Unpacks the values of scalars; other tensors are skipped.
        form = "".join(f"{len(hole.before)}x{hole.scalar or f'{hole.size}x0s'}" for hole in holes)
        self._unpack_scalars = struct.Struct("<" + form).unpack_from
        self.tail = before
        self.size = offset + len(before)
        # A byte of 128 or more would belong to a longer varint. A bool is 0 or 1 from any usual writer.
        self.many = [hole for hole in holes if hole.one_byte and hole.count > _MANY]  # checked in another way
        elements = (b"[\\x00-\\x%02x]" % hole.most if hole.one_byte and hole.count <= _MANY else b"." for hole in holes)
        # One call into C compares all constants and checks all small integers.
        self.pattern = re.compile(
            b"".join(
                re.escape(hole.before) + element + b"{%d}" % hole.size
                for hole, element in zip(holes, elements, strict=True)
            )
            + re.escape(self.tail),
            # Elements may be any byte, including a line feed.
            re.DOTALL,
        )

    @staticmethod
    def holds(specs: Sequence[tuple[int, Spec]]) -> bool:
        """True if all of these are numbers of a fixed shape, with at least one element."""
        return all(
            spec.dtype.kind in "biuf"
            and spec.dtype.str[1:] in _MEMBERS
            # Without elements a payload has no field `array`.
            and all(size > 0 for size in spec.shape)
            and 0 <= uid < 1 << 63
            and math.prod(spec.shape) < 1 << 28  # times eight bytes is 2 GiB, protobuf's largest message
            for uid, spec in specs
        )

    def write(self, arrays: Sequence[Array | float | bool], parts: list[bytes | memoryview]) -> bool:
        """Append the entries with these elements to `parts`. Return False if an array has another form."""
        filled: list[Any] = list(arrays)
        for index, dtype, shape, narrows, large, _ in self._arrays:
            array = filled[index]
            if not isinstance(array, _ARRAYS) or array.dtype != dtype or array.shape != shape:
                return False  # before anything is appended: protobuf writes the whole message
            if narrows and array.size <= FEW:
                try:
                    filled[index] = stored = bytes(array.ravel().tolist())
                except ValueError:  # one is negative, or needs more than a byte
                    return False
                if not stored.isascii():
                    return False
                continue
            if narrows:
                if array.min() < 0 or array.max() > 127:
                    return False
                array = array.astype(_BYTE)
            # A large array is sent from its own memory.
            filled[index] = array.data.cast("B") if large and array.flags.c_contiguous else array.tobytes()
        for pack, constants, first, stop in self._pieces:
            if pack is None:
                parts.append(filled[first])
                continue
            fields = constants[:]
            fields[1::2] = filled[first:stop]
            parts.append(pack(*fields))
        return True

    def whole(self, head: bytes, tail: bytes) -> _Whole | None:
        """Return what packs a whole message with these entries in one call; None: a tensor is large.

        Args:
            head: The bytes before the entries.
            tail: The bytes after the entries.
        """
        plain = [
            (index, dtype, shape) for index, dtype, shape, narrows, large, _ in self._arrays if not (narrows or large)
        ]
        if len(plain) < len(self._arrays):
            return None
        ((_, constants, _, _),) = self._pieces
        fields = [head + constants[0], *constants[1:-1], constants[-1] + tail]
        forms = [hole.scalar or f"{hole.size}s" for hole in self.holes]
        between = [f"{len(constant)}s" for constant in fields[::2]]
        form = "<" + "".join(map("".join, zip(between, [*forms, ""], strict=True)))
        return struct.Struct(form).pack, fields, plain

    def matches(self, data: bytes | bytearray, start: int) -> bool:
        """True if `data` has the entries at `start`, with equal constant bytes."""
        return self.pattern.match(data, start) is not None and self.many_match(data, start)

    def many_match(self, data: bytes | bytearray, start: int) -> bool:
        """True if all elements in the holes that `pattern` does not check are encoded in one byte."""
        for hole in self.many:
            stored = data[start + hole.offset : start + hole.offset + hole.size]
            # `isascii` means that all bytes are below 128. `translate` returns those that are neither 0 nor 1.
            if not stored.isascii() or (hole.dtype.kind == "b" and stored.translate(None, b"\0\1")):
                return False
        return True

    def values(self, data: bytes | bytearray, start: int) -> list[Any]:
        """Return the tensors of a match as `read` does, but single floats and bools as Python's own."""
        found: list[Any] = list(self._unpack_scalars(data, start))
        for index, _, _, _, _, hole in self._arrays:
            found[index] = hole.array(data, start)
        return found

    def read_many(self, answers: Sequence[StepAnswer]) -> list[Array]:
        """Return the tensors of several matches of this template, stacked along a new first dimension."""
        size = self.size
        # Join the answers to one table of bytes, so that NumPy is called once per tensor, not once per answer.
        stacked = b"".join([answer.data[answer.start : answer.start + size] for answer in answers])
        table: Array = np.frombuffer(stacked, _BYTE).reshape(len(answers), size)
        found: list[Array] = []
        for hole in self.holes:
            array = np.ascontiguousarray(table[:, hole.offset : hole.offset + hole.size]).view(hole.stored)
            if hole.stored is not hole.dtype:
                array = array.astype(hole.dtype)
            found.append(array.reshape(len(answers), *hole.shape))
        return found

    def blank(self) -> bytes:
        """Return the entries with zeros as elements."""
        parts: list[bytes | memoryview] = []
        self.write([np.zeros(hole.shape, hole.dtype) for hole in self.holes], parts)
        return b"".join(parts)

    def write_many(self, blank: Array, columns: Sequence[Array]) -> list[bytes] | None:
        """Return one message for each row of the columns; None: an array has another form.

        Args:
            blank: The bytes of a message whose entries, with zeros as elements, come last.
            columns: An array of shape `(rows, *shape)` for each tensor.
        """
        count, first = len(columns[0]), len(blank) - self.size
        table = np.tile(blank, (count, 1))
        for hole, column in zip(self.holes, columns, strict=True):
            if column.dtype != hole.dtype or column.shape[1:] != hole.shape:
                return None
            if hole.one_byte and hole.dtype.kind != "b":
                if column.min() < 0 or column.max() > 127:
                    return None
                column = column.astype(_BYTE)
            start = first + hole.offset
            flat = np.ascontiguousarray(column).reshape(count, -1)
            table[:, start : start + hole.size] = flat.view(_BYTE)
        data, size = table.tobytes(), len(blank)
        return [data[start : start + size] for start in range(0, count * size, size)]

    def read(self, data: bytes | bytearray, start: int, count: int | None = None) -> list[Array]:
        """Return the first `count` tensors of a match, or all (None); they may share its memory."""
        return [hole.array(data, start) for hole in self.holes[:count]]


_Piece = tuple["Callable[..., bytes] | None", list[Any], int, int]
# What packs a message, its arguments with None for the elements, and the types and shapes of those that are arrays.
_Whole = tuple["Callable[..., bytes] | None", list[Any], list[tuple[int, np.dtype[Any], tuple[int, ...]]]]
_NOT_WHOLE: _Whole = None, [], []


def _pieces(holes: Sequence[_Hole], tail: bytes) -> list[_Piece]:
    """Cut a message into pieces: constants and small tensors, which one call packs, and large tensors, one per piece.

    A large tensor is sent from its own memory; its piece has no function.

    Returns:
        For each piece the function, its arguments with None for the elements, and the first and last hole in it.
    """
    pieces: list[_Piece] = []
    first, form, fields = 0, "<", list[Any]()
    for index, hole in enumerate(holes):
        form += f"{len(hole.before)}s"
        fields.append(hole.before)
        if hole.size < _LARGE:
            form += hole.scalar or f"{hole.size}s"
            fields.append(None)
            continue
        pieces += [(struct.Struct(form).pack, fields, first, index), (None, [], index, index + 1)]
        first, form, fields = index + 1, "<", []
    pieces.append((struct.Struct(f"{form}{len(tail)}s").pack, [*fields, tail], first, len(holes)))
    return pieces


# Slots of equal worlds share one template: answers are stacked if their template is the same object.
@functools.lru_cache(maxsize=256)
def _template_of(entry: bytes, forms: tuple[tuple[int, str, tuple[int, ...]], ...]) -> _Template:
    return _Template(entry, [(uid, Spec.number("", shape, np.dtype(dtype))) for uid, dtype, shape in forms])


def _template(entry: bytes, specs: Sequence[tuple[int, Spec]]) -> _Template:
    """Return the shared template of tensors of these UIDs, types and shapes."""
    return _template_of(entry, tuple((uid, spec.dtype.str, spec.shape) for uid, spec in specs))


@functools.lru_cache(maxsize=1024)
def _response_head(size: int) -> bytes:
    """Return the bytes before the state in the response to a Step of this size."""
    return b"\x1a" + pack_varint(size) + b"\x08"


@functools.lru_cache(maxsize=1024)
def _info_frame(uid: int, size: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after an info of this size in its entry, as protobuf writes it."""
    member = b"\x0a" + pack_varint(size) if size else b""
    payload = b"\x32" + pack_varint(len(member) + size) + member
    dims = pack_varint(size)
    tail = b"\x7a" + pack_varint(len(dims)) + dims
    tensor = b"\x12" + pack_varint(len(payload) + size + len(tail)) + payload
    body = b"\x08" + pack_varint(uid) + tensor
    return _RESPONSE_ENTRY + pack_varint(len(body) + size + len(tail)) + body, tail


class StepAnswer:
    """The response to a Step that matched a template: its bytes, and the fields read from them."""

    __slots__ = ("data", "info", "start", "state", "template")

    def __init__(
        self, data: bytes | bytearray, start: int, state: int, info: bytes | None, template: _Template
    ) -> None:
        self.data, self.start, self.state, self.info, self.template = data, start, state, info, template

    def values(self) -> list[Any]:
        """Return the observations except the info: single floats and bools as Python's, others as `arrays`."""
        return self.template.values(self.data, self.start)

    def arrays(self, count: int | None = None) -> list[Array]:
        """Return the first `count` observations, or without the info all (None); may share the response's memory."""
        return self.template.read(self.data, self.start, count)

    @staticmethod
    def stack(answers: Sequence[StepAnswer]) -> list[Array]:
        """Return the observations, except the info, of answers with the same `template`, stacked."""
        return answers[0].template.read_many(answers)


class StepCodec:
    """Writes and reads the Steps of one agent that requests the same observations each time.

    Args:
        actions: The actions' UIDs and specs, in the order in which they are written.
        observations: The observations' UIDs and specs, in the order in which they are requested, without the info.
        info_uid: The UID of the info, of shape `(-1,)` and type uint8, which is requested last; 0: no info.
    """

    def __init__(
        self, actions: Sequence[tuple[int, Spec]], observations: Sequence[tuple[int, Spec]], info_uid: int
    ) -> None:
        wanted = [*(uid for uid, _ in observations), *([info_uid] if info_uid else [])]
        self.first = pb.EnvironmentRequest(step=pb.StepRequest(requested_observations=wanted)).SerializeToString()
        """The Step without actions, with which a sequence begins."""
        self._info_uid = info_uid
        self.has_info = info_uid > 0
        """True if the last observation is the info."""
        self._actions = _template(_REQUEST_ENTRY, actions)
        self._observations = _template(_RESPONSE_ENTRY, observations)
        wants = pb.StepRequest(requested_observations=wanted).SerializeToString()
        # Fields may come in any order: with `requested_observations` before `actions`, all constants are one piece.
        # `actions` must be one field: protobuf merges two in a row, but other readers keep only the second.
        self._request_head = b"\x1a" + pack_varint(len(wants) + self._actions.size) + wants
        self._request_size = len(self._request_head) + self._actions.size
        self._blank_request: Array = np.frombuffer(self._request_head + self._actions.blank(), _BYTE)
        self.form: object = (self._request_head, self._actions)
        """A key that is equal for codecs that write equal requests."""
        entry = self._write_info(b"") if self.has_info else b""
        # The last written response: its info, the bytes of the info, and the bytes before the state. `self` equals no
        # info, so the first info is always written.
        self._last_written: tuple[object, bytes, bytes] = (self, b"", b"")
        # What packs a response with that info, in a running sequence, in one call; None: not needed yet.
        self._whole: _Whole | None = None
        # The last answer: its size, its bytes up to the state, its info, and the bytes of the info.
        self._last_answer: tuple[int, bytes, bytes | None, bytes] = (-1, b"", b"" if self.has_info else None, entry)

    @classmethod
    def make(cls, actions: Sequence[tuple[int, Spec]], observations: Sequence[tuple[int, Spec]]) -> StepCodec | None:
        """Return a codec; None: a tensor varies in size or holds no numbers."""
        has_info = bool(observations) and observations[-1][1].shape == (-1,) and observations[-1][1].dtype == _BYTE
        fixed = observations[:-1] if has_info else observations
        if not fixed or not actions or not _Template.holds(fixed) or not _Template.holds(actions):
            return None
        if has_info and not 0 < observations[-1][0] < 1 << 63:  # 0 stands for no info
            return None
        return cls(actions, fixed, observations[-1][0] if has_info else 0)

    def write_request(self, arrays: Sequence[Array]) -> bytes | None:
        """Return the Step with these actions; None: an action has no fixed size, such as an integer over 127."""
        parts: list[bytes | memoryview] = [self._request_head]
        return b"".join(parts) if self._actions.write(arrays, parts) else None

    def write_requests(self, columns: Sequence[Array]) -> list[bytes] | None:
        """Return the Step for each row of the columns; None: the caller must use `write_request`."""
        return self._actions.write_many(self._blank_request, columns)

    def read_request(self, data: bytes | bytearray) -> list[Array] | None:
        """Return the actions of a Step, sharing memory with `data`; None: protobuf must read it."""
        if len(data) != self._request_size or not data.startswith(self._request_head):
            return None
        start = len(self._request_head)
        return self._actions.read(data, start) if self._actions.matches(data, start) else None

    def write_response(
        self, state: int, arrays: Sequence[Any], info: bytes | Array | None
    ) -> list[bytes | memoryview] | None:
        """Return a response in parts, large ones sharing memory with the arrays; None: protobuf must write it.

        Args:
            state: The state of the sequence after the Step.
            arrays: The observations; those of one element may be Python's float or bool.
            info: The info's bytes.
        """
        # As bytes it can be compared with the last info.
        if info is not None and not isinstance(info, bytes):
            info = info.tobytes()
        known, entry, head = self._last_written
        # Most infos are empty, and so equal to the last one, whose entry is then used again.
        if info != known:
            entry = self._write_info(info or b"") if self.has_info else b""
            size = 2 + self._observations.size + len(entry)
            head = _response_head(size)
            self._last_written, self._whole = (info, entry, head), None
        elif state == _RUNNING:
            # Made only when needed: infos may change in each step.
            if self._whole is None:
                self._whole = self._observations.whole(head + _SMALL[state], entry) or _NOT_WHOLE
            pack, constants, tensors = self._whole
            filled = list(arrays)
            for index, dtype, shape in tensors:
                array = filled[index]
                if not isinstance(array, _ARRAYS) or array.dtype != dtype or array.shape != shape:
                    return None
                filled[index] = array.tobytes()
            if pack is not None:
                fields = constants[:]
                fields[1::2] = filled
                return [pack(*fields)]
        parts: list[bytes | memoryview] = [head + _SMALL[state]]
        if not self._observations.write(arrays, parts):
            return None
        parts.append(entry)
        return parts if self._observations.has_large else [b"".join(parts)]

    def _write_info(self, info: bytes) -> bytes:
        head, tail = _info_frame(self._info_uid, len(info))
        return head + info + tail

    def read_response(self, data: bytes | bytearray) -> StepAnswer | None:
        """Match a response; None: protobuf must read it."""
        size, head, known, entry = self._last_answer
        if len(data) != size or not data.startswith(head) or not data.endswith(entry):
            if not self._expect(data):
                return None
            size, head, known, entry = self._last_answer
        start, template = len(head) + 1, self._observations
        state = data[start - 1]
        # RUNNING, TERMINATED or INTERRUPTED. Other states are left to the reader of protobuf messages.
        if not 1 <= state <= 3 or template.pattern.match(data, start) is None:
            return None
        # The body of `matches`, to save a call in every step.
        if template.many and not template.many_match(data, start):
            return None
        return StepAnswer(data, start, state, known, template)

    def _expect(self, data: bytes | bytearray) -> bool:
        """Remember how a response begins and ends, for comparison with later ones. Return False if it is no Step's."""
        try:
            size, start = read_varint(data, 1, 5)
        except TensorError:
            return False
        stop = start + 2 + self._observations.size
        if data[:1] != b"\x1a" or start + size != len(data) or stop > len(data) or data[start] != 8:
            return False
        known, entry = self._last_answer[2:]
        rest = bytes(memoryview(data)[stop:])
        if rest != entry:
            known = self._read_info(rest) if self._info_uid else None
            if known is None:
                return False
        self._last_answer = (len(data), bytes(memoryview(data)[: start + 1]), known, rest)
        return True

    def _read_info(self, rest: bytes) -> bytes | None:
        """Read the last entry; None: protobuf would write it in another way."""
        # The frame around an info grows with it, by a byte for each length that needs one more. The frame of an info as
        # large as the whole entry has the same size, or is a few bytes larger.
        around = sum(map(len, _info_frame(self._info_uid, len(rest))))
        for size in range(max(len(rest) - around, 0), len(rest) - around + _LENGTHS):
            head, tail = _info_frame(self._info_uid, size)
            start, stop = len(head), len(head) + size
            if stop + len(tail) == len(rest):
                return rest[start:stop] if rest.startswith(head) and rest.endswith(tail) else None
        return None
