"""The Step by hand: the same messages as protobuf's, and protobuf where they are not as expected to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.core.encoding.step_codec import StepAnswer, StepCodec
from bridge.core.encoding.tensors import Spec, fill_tensor, unpack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb

DTYPES = ("f4", "f8", "i1", "i4", "i8", "u1", "u4", "u8", "?")
INFO = Spec.number("info", (-1,), np.uint8)


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0, high: int = 128) -> Any:
    random = np.random.default_rng(seed)
    if dtype == "?":
        return random.random(shape) < 0.5
    if dtype[0] == "f":
        return np.asarray(random.normal(size=shape), dtype)
    return np.asarray(random.integers(-100 if dtype == "i1" else 0, high, shape), dtype)


def make(dtypes: tuple[str, ...], shape: tuple[int, ...], info: bool = True) -> StepCodec:
    specs = [(uid, Spec.number(f"t{uid}", shape, dtype)) for uid, dtype in enumerate(dtypes, start=1)]
    codec = StepCodec.make(specs, [*specs, (300, INFO)] if info else specs)
    assert codec is not None
    return codec


def response_of(arrays: list[Any], state: int, info: bytes) -> pb.EnvironmentResponse:
    message = pb.EnvironmentResponse()
    message.step.state = state  # type: ignore[assignment]
    for uid, array in enumerate(arrays, start=1):
        fill_tensor(message.step.observations[uid], array)
    fill_tensor(message.step.observations[300], np.frombuffer(info, np.uint8))
    return message


SHAPES = [(), (1,), (3,), (2, 5), (64, 4), (210, 160, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_by_hand_is_what_protobuf_would_say(shape: tuple[int, ...]) -> None:
    codec = make(DTYPES, shape)
    arrays = [numbers(dtype, shape, seed) for seed, dtype in enumerate(DTYPES)]
    request = codec.write_request(arrays)
    assert request is not None
    message = pb.EnvironmentRequest.FromString(request)
    assert list(message.step.requested_observations) == [*range(1, 10), 300]
    assert message.ByteSize() == len(request)  # by which a gateway knows that there is nothing else in it
    for uid, array in enumerate(arrays, start=1):
        back = unpack_tensor(message.step.actions[uid])
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    for info in (b"", b"x", b"y" * 300):
        parts = codec.write_response(pb.TERMINATED, arrays, info)
        assert parts is not None
        assert pb.EnvironmentResponse.FromString(b"".join(parts)) == response_of(arrays, pb.TERMINATED, info)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_info_may_come_again_with_other_arrays_and_states(shape: tuple[int, ...]) -> None:
    codec = make(DTYPES, shape)
    ends = pb.TERMINATED, pb.INTERRUPTED
    for index, info in enumerate([b"", b"", b"", b"x", b"x", b"x", b"y" * 300, b"y" * 300, b"", b""]):
        for state in (pb.RUNNING, pb.RUNNING, ends[index % 2], pb.RUNNING):
            arrays = [numbers(dtype, shape, index + seed) for seed, dtype in enumerate(DTYPES)]
            parts = codec.write_response(state, arrays, info)
            assert parts is not None
            assert pb.EnvironmentResponse.FromString(b"".join(parts)) == response_of(arrays, state, info)


@pytest.mark.parametrize("container", [bytes, bytearray])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_by_hand_is_read_by_hand(shape: tuple[int, ...], container: Any) -> None:
    writer, reader = make(DTYPES, shape), make(DTYPES, shape)
    arrays = [numbers(dtype, shape, seed) for seed, dtype in enumerate(DTYPES)]
    request = writer.write_request(arrays)
    assert request is not None
    got = reader.read_request(container(request))
    assert got is not None
    for info in (b"", b"x", b"y" * 300, b"x"):
        parts = writer.write_response(pb.RUNNING, arrays, info)
        assert parts is not None
        answer = reader.read_response(container(b"".join(parts)))
        assert answer is not None
        assert (answer.state, answer.info) == (pb.RUNNING, info)
        for found in (got, answer.arrays()):
            for mine, array in zip(found, arrays, strict=True):
                assert (mine.dtype, mine.shape, mine.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("around", [0, 64, 127, 1 << 14])
def test_an_info_of_any_size_is_read_by_hand(around: int) -> None:
    """The lengths around it take a byte more from certain sizes on, each from another one."""
    arrays = [numbers("f4", (3,))]
    writer, reader = make(("f4",), (3,)), make(("f4",), (3,))
    for size in range(max(0, around - 40), around + 40):
        info = b"i" * size
        parts = writer.write_response(pb.RUNNING, arrays, info)
        assert parts is not None
        data = b"".join(parts)
        assert pb.EnvironmentResponse.FromString(data) == response_of(arrays, pb.RUNNING, info)
        answer = reader.read_response(data)
        assert answer is not None
        assert answer.info == info


@pytest.mark.parametrize("value", [-1, 128, 2**40])
def test_integers_of_several_bytes_are_left_to_protobuf(value: int) -> None:
    for shape in [(), (3,)]:
        codec = make(("i8",), shape)
        array = np.full(shape, value, np.int64)
        assert codec.write_request([array]) is None
        assert codec.write_response(1, [array], b"") is None
        message = response_of([array], pb.RUNNING, b"").SerializeToString()
        assert codec.read_response(message) is None


def test_what_has_no_fixed_size_has_no_codec() -> None:
    plain = (1, Spec.number("a", (2,), np.float32))
    text, variable = (2, Spec.text("b", ())), (3, Spec.number("c", (-1, 2), np.float32))
    empty = (4, Spec.number("d", (0, 2), np.float32))
    for other in (text, variable, empty):
        assert StepCodec.make([plain], [plain, other]) is None
        assert StepCodec.make([other], [plain]) is None
    assert StepCodec.make([plain], []) is None
    assert StepCodec.make([plain], [plain]) is not None


def test_a_peer_may_number_its_tensors_from_zero() -> None:
    specs = [(uid, Spec.number(f"t{uid}", (2,), np.float32)) for uid in range(2)]
    codec = StepCodec.make(specs, [*specs, (2, INFO)])
    assert codec is not None
    arrays = [numbers("f4", (2,), seed) for seed in range(2)]
    request = codec.write_request(arrays)
    assert request is not None
    read = pb.EnvironmentRequest.FromString(request).step
    assert sorted(read.actions) == [0, 1]
    assert list(read.requested_observations) == [0, 1, 2]
    message = pb.EnvironmentResponse()
    message.step.state = pb.RUNNING
    for uid, array in enumerate([*arrays, np.zeros(0, np.uint8)]):
        fill_tensor(message.step.observations[uid], array)
    parts = codec.write_response(pb.RUNNING, arrays, b"")
    assert parts is not None
    assert pb.EnvironmentResponse.FromString(b"".join(parts)) == message
    answer = codec.read_response(b"".join(parts))
    assert answer is not None
    assert [found.tolist() for found in answer.arrays()] == [array.tolist() for array in arrays]
    # 0 stands for no info, which only a foreign server could number so.
    assert StepCodec.make(specs, [(1, specs[1][1]), (0, INFO)]) is None


def test_arrays_of_another_shape_or_type_are_not_written() -> None:
    codec = make(("f4",), (3,))
    assert codec.write_request([np.zeros(4, np.float32)]) is None
    assert codec.write_request([np.zeros(3, np.float64)]) is None
    assert codec.write_response(1, [np.zeros((3, 1), np.float32)], b"") is None


def test_every_truncation_is_left_to_protobuf() -> None:
    codec = make(("f4", "i8", "?"), (3,))
    arrays = [numbers("f4", (3,)), numbers("i8", (3,)), numbers("?", (3,))]
    request, parts = codec.write_request(arrays), codec.write_response(1, arrays, b"some info")
    assert request is not None
    assert parts is not None
    response = b"".join(parts)
    for stop in range(len(request)):
        assert codec.read_request(request[:stop]) is None
    for stop in range(len(response)):
        assert codec.read_response(response[:stop]) is None
    assert codec.read_response(response + b"\0") is None


@pytest.mark.parametrize("shape", [(3,), (40,)])
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_is_read_from_damaged_bytes_is_what_protobuf_reads(shape: tuple[int, ...], data: st.DataObject) -> None:
    codec = make(("f4", "i8", "?"), shape)
    arrays = [numbers("f4", shape), numbers("i8", shape), numbers("?", shape)]
    parts = codec.write_response(data.draw(st.integers(1, 3)), arrays, data.draw(st.sampled_from([b"", b"info"])))
    request = codec.write_request(arrays)
    assert parts is not None
    assert request is not None
    damaged = []
    for original in (b"".join(parts), request):
        changed = bytearray(original)
        for _ in range(data.draw(st.integers(1, 3))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        damaged.append(bytes(changed))
    answer = codec.read_response(damaged[0])
    if answer is not None:
        message = pb.EnvironmentResponse.FromString(damaged[0]).step
        assert message.state == answer.state
        assert message.observations[300].uint8s.array == answer.info
        for uid, mine in enumerate(answer.arrays(), start=1):
            theirs = unpack_tensor(message.observations[uid])
            assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
    found = codec.read_request(damaged[1])
    if found is not None:
        read = pb.EnvironmentRequest.FromString(damaged[1]).step
        assert list(read.requested_observations) == [1, 2, 3, 300]
        for uid, mine in enumerate(found, start=1):
            assert mine.tobytes() == unpack_tensor(read.actions[uid]).tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (40,), (5, 7)])
def test_many_are_written_and_read_at_once_as_one_by_one(shape: tuple[int, ...]) -> None:
    codec, other = make(DTYPES, shape), make(DTYPES, shape)
    assert codec.form == other.form
    columns = [numbers(dtype, (6, *shape), seed) for seed, dtype in enumerate(DTYPES)]
    rows = [[column[index] for column in columns] for index in range(6)]
    assert codec.write_requests(columns) == [codec.write_request(row) for row in rows]
    answers = []
    for index, row in enumerate(rows):
        parts = codec.write_response(1 + index % 3, row, b"i" * (index * 60))  # where they start differs
        assert parts is not None
        answers.append((codec, other)[index % 2].read_response(b"".join(parts)))
    found = StepAnswer.stack([answer for answer in answers if answer is not None])
    for mine, column in zip(found, columns, strict=True):
        assert (mine.dtype, mine.shape, mine.tobytes()) == (column.dtype, column.shape, column.tobytes())
    for answer, row in zip(answers, rows, strict=True):
        assert answer is not None
        for value, array in zip(answer.values(), row, strict=True):
            assert np.array_equal(value, array)
            assert isinstance(value, (float, bool, np.ndarray))


def test_many_that_do_not_fit_are_not_written_at_once() -> None:
    codec = make(("f4", "i8"), (2,))
    fit = [np.zeros((3, 2), np.float32), np.zeros((3, 2), np.int64)]
    assert codec.write_requests(fit) is not None
    for wrong in (np.full((3, 2), 128), np.full((3, 2), -1), np.zeros((3, 1), np.int64), np.zeros((3, 2), np.int32)):
        assert codec.write_requests([fit[0], wrong]) is None
    assert make(("f4", "i8"), (3,)).form != codec.form


def test_single_floats_and_bools_are_written_as_arrays_of_them() -> None:
    codec = make(("f8", "?", "f4"), ())
    arrays = [np.array(1.5), np.array(True), np.array(2.5, np.float32)]
    assert codec.write_response(1, [1.5, True, arrays[2]], b"x") == codec.write_response(1, arrays, b"x")
    assert codec.write_response(1, [1.5, True, 2.5], b"x") is None  # Python has no float32


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_garbage_is_left_to_protobuf(garbage: bytes) -> None:
    codec = make(("f4", "i8"), (3,))
    assert codec.read_request(garbage) is None
    assert codec.read_response(garbage) is None


def test_a_request_is_one_message_and_not_two_in_a_row():
    """Protobuf merges two messages in a row; other readers let the second replace the first."""
    made = StepCodec.make(
        [(1, Spec.number("a", (3,), np.dtype(np.float64)))], [(2, Spec.number("o", (), np.dtype("<f8")))]
    )
    data = made.write_request([np.array([1.0, 2.0, 3.0])])
    assert data[0] == 0x1A
    assert data[1] == len(data) - 2
    step = pb.EnvironmentRequest.FromString(data).step
    assert list(step.requested_observations) == [2]
    assert list(step.actions) == [1]
    assert made.write_requests([np.array([[1.0, 2.0, 3.0]])]) == [data]


@pytest.mark.parametrize("shape", [(1,), (64,), (2, 30), (256,), (257,), (300, 2)])
@pytest.mark.parametrize("dtype", ["i4", "i8", "u4", "u8"])
def test_few_and_many_integers_are_written_as_protobuf_writes_them(dtype: str, shape: tuple[int, ...]) -> None:
    """Each of them a byte, or None, where one takes more: protobuf then writes the message."""
    codec, array = make((dtype,), shape, info=False), np.resize(np.array([0, 1, 127], dtype), shape)
    message = pb.EnvironmentRequest.FromString(codec.write_request([array]))
    written = unpack_tensor(message.step.actions[1])
    assert (written.dtype, written.tolist()) == (array.dtype, array.tolist())
    for wrong in (128, 255, 256, np.iinfo(dtype).max, np.iinfo(dtype).min or 300):
        for place in (0, -1):
            larger = array.copy()
            larger.flat[place] = wrong
            assert codec.write_request([larger]) is None
