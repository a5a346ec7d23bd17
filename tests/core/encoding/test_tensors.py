"""`bridge.core.encoding.tensors`: every dtype, beside the public messages, and no lossy cast (D-11, D-19, D-20)."""

import math

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public
from dm_env_rpc.v1 import tensor_utils
from google.protobuf import any_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bridge.core.encoding.tensors import WIRE_DTYPES, Spec, cast, fill_tensor, pack_tensor, unpack_tensor, wire_dtype
from bridge.errors import TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.support import stable_id

MEMBERS = ("floats", "doubles", "int8s", "int32s", "int64s", "uint8s", "uint32s", "uint64s", "bools")
every_dtype = pytest.mark.parametrize("dtype", WIRE_DTYPES, ids=str)
few = settings(max_examples=60, deadline=None)


def extremes(dtype):
    """The numbers at which a dtype goes wrong first."""
    if dtype.kind == "b":
        return [False, True]
    if dtype.kind == "f":
        limits = np.finfo(dtype)
        return [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf, limits.max, limits.min, limits.smallest_subnormal]
    limits = np.iinfo(dtype)
    return [0, 1, 127, limits.min, limits.max, limits.max - 1]


def identical(one, other):
    """True if two arrays have the same dtype, shape and bits."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# The wire


@every_dtype
def test_the_bytes_of_every_dtype_are_those_of_the_public_messages(dtype):
    for array in (
        np.array(extremes(dtype), dtype),
        np.array(extremes(dtype)[1], dtype),
        np.zeros((0, 3), dtype),
        np.arange(120).astype(dtype).reshape(2, 3, 20),
        np.arange(200).astype(dtype),
        np.full(300, 127).astype(dtype),
        np.full(300, 128).astype(dtype) if dtype.itemsize > 1 else np.ones(300, dtype),
    ):
        ours = pack_tensor(array)
        theirs = tensor_utils.pack_tensor(array)
        if array.size == 0:
            getattr(theirs, theirs.WhichOneof("payload") or ours.WhichOneof("payload")).SetInParent()
        assert ours.SerializeToString() == theirs.SerializeToString()


@every_dtype
def test_the_public_library_reads_what_is_packed_and_the_reverse(dtype):
    array = np.array(extremes(dtype) * 30, dtype)
    theirs = tensor_utils.unpack_tensor(public.Tensor.FromString(pack_tensor(array).SerializeToString()))
    assert identical(np.asarray(theirs), array)
    ours = unpack_tensor(pb.Tensor.FromString(tensor_utils.pack_tensor(array).SerializeToString()))
    assert identical(ours, array)


@pytest.mark.parametrize(
    ("value", "golden"),
    [
        (np.float32([1.0, -2.0]), "0a0a0a080000803f000000c07a0102"),
        (np.float64(0.5), "120a0a08000000000000e03f"),
        (np.int8([-1, 2]), "1a040a02ff027a0102"),
        (np.int32([-1]), "220c0a0affffffffffffffffff017a0101"),
        (np.int64(300), "2a040a02ac02"),
        (np.uint8([[0, 255]]), "32040a0200ff7a020102"),
        (np.uint32([2**32 - 1]), "3a070a05ffffffff0f7a0101"),
        (np.uint64([1, 2**63]), "420d0a0b01808080808080808080017a0102"),
        (np.array([True, False]), "4a040a0201007a0102"),
        ("hé", "52050a0368c3a9"),
        (np.zeros((0,), np.float32), "0a007a0100"),
    ],
    ids=lambda value: "" if isinstance(value, str) and len(value) > 2 else None,
)
def test_golden_bytes(value, golden):
    assert pack_tensor(value).SerializeToString().hex() == golden
    read = unpack_tensor(pb.Tensor.FromString(bytes.fromhex(golden)))
    assert read.shape == np.shape(value)
    assert (read == value).all()


@every_dtype
def test_round_trip_of_every_dtype_in_every_memory_layout(dtype):
    base = np.array(extremes(dtype) * 24, dtype)[:48].reshape(4, 12)
    for array in (base, base.T, base[::2, ::-3], np.asfortranarray(base), base.astype(dtype.newbyteorder(">"))):
        read = unpack_tensor(pb.Tensor.FromString(pack_tensor(array).SerializeToString()))
        assert identical(read, np.ascontiguousarray(array, dtype))  # D-19: row-major


@few
@given(
    hnp.arrays(
        st.sampled_from(WIRE_DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6), unique=False
    )
)
def test_any_array_comes_back_bit_for_bit(array):
    assert identical(unpack_tensor(pb.Tensor.FromString(pack_tensor(array).SerializeToString())), array)


@few
@given(hnp.arrays(object, hnp.array_shapes(min_dims=0, max_side=4), elements=st.text(max_size=3)))
def test_any_text_comes_back(array):
    # D-19
    tensor = pb.Tensor.FromString(pack_tensor(array).SerializeToString())
    assert tensor.WhichOneof("payload") == "strings"
    read = unpack_tensor(tensor)
    assert read.shape == array.shape
    assert read.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("value", "member", "shape"),
    [
        (3, "int64s", []),
        (-0.5, "doubles", []),
        (True, "bools", []),
        ("", "strings", []),
        (np.str_("ab"), "strings", []),
        (["a", "bc"], "strings", [2]),
        (np.array([["a"], ["b"]]), "strings", [2, 1]),
        ([[1, 2], [3, 4]], "int64s", [2, 2]),
        ((1.0, 2.0), "doubles", [2]),
        ([1, 0.5], "doubles", [2]),
        ([], "doubles", [0]),
        (np.float16([0.1]), "floats", [1]),
        (np.int16([-3]), "int32s", [1]),
        (np.uint16([65535]), "uint32s", [1]),
    ],
)
def test_pack_takes_scalars_lists_texts_and_narrow_dtypes(value, member, shape):
    tensor = pack_tensor(value)
    assert tensor.WhichOneof("payload") == member
    assert list(tensor.shape) == shape
    if shape != [0]:
        assert unpack_tensor(tensor).tolist() == np.asarray(value).tolist()


def test_protos_are_read_and_written_and_any_passes_as_it_is():
    # D-19
    inner = pb.TensorSpec(name="x")
    wrapped = any_pb2.Any(type_url="type.googleapis.com/some.Thing", value=b"\x01")
    array = np.array([inner, wrapped], dtype=object)
    read = unpack_tensor(pb.Tensor.FromString(pack_tensor(array).SerializeToString()))
    assert read.shape == (2,)
    unpacked = pb.TensorSpec()
    assert read[0].Unpack(unpacked)
    assert unpacked == inner
    assert read[1] == wrapped
    scalar = pack_tensor(inner)
    assert scalar.WhichOneof("payload") == "protos"
    assert not scalar.shape


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1], [2, 3]], "ragged"),
        (1j, "the dtype complex128 cannot be sent"),
        (np.datetime64("2020-01-01"), "cannot be sent"),
        (np.zeros(2, "i4,f8"), "cannot be sent"),
        (b"abc", "cannot be sent"),
        (None, "got a NoneType"),
        ([None, 1], "got a NoneType"),
        (object(), "got a object"),
        ({"a": 1}, "got a dict"),
        (2**70, "got a int"),
        (["a", 1], "text and int 1"),
        ([["a"], [b"b"]], "text and bytes"),
        ([2**53 + 1, 0.5], "9007199254740993 beside floats"),
        ([-1, 2**63 + 1], "9223372036854775809 beside floats"),
        (["\ud800"], "UTF-8"),
    ],
    ids=stable_id,
)
def test_what_no_tensor_holds_is_refused_with_the_reason(value, message):
    # D-19: nothing ragged, nothing changed in silence.
    with pytest.raises(TensorError, match=message):
        pack_tensor(value)


def test_fill_tensor_writes_into_the_message_that_it_is_given():
    response = pb.StepResponse()
    fill_tensor(response.observations[7], np.arange(3, dtype=np.uint8))
    assert response.observations[7] == pb.Tensor(uint8s=pb.Tensor.Uint8Array(array=b"\x00\x01\x02"), shape=[3])
    fill_tensor(response.observations[8], np.zeros((), np.int32))
    assert unpack_tensor(response.observations[8]).shape == ()


# Reading: scalars, variable dimensions, broadcast, ownership


@pytest.mark.parametrize("member", MEMBERS)
def test_what_is_read_is_writable_and_shares_nothing(member):
    for shape in ([], [1], [2, 3], [-1, 2], [5]):
        count = 6 if shape and shape != [5] and shape != [1] else 1
        tensor = pb.Tensor(shape=shape)
        payload = getattr(tensor, member)
        if member in ("int8s", "uint8s"):
            payload.array = b"\x01" * count
        else:
            payload.array.extend([1] * count)
        before = tensor.SerializeToString()
        one, other = unpack_tensor(tensor), unpack_tensor(tensor)
        assert one.flags.writeable
        assert one.flags.owndata or one.base.flags.writeable
        one[...] = 0
        assert other.all()
        assert tensor.SerializeToString() == before


def test_a_scalar_has_the_empty_shape_and_exactly_one_element():
    # D-19
    assert unpack_tensor(pb.Tensor(floats=pb.Tensor.FloatArray(array=[2.5]))).shape == ()
    for elements in ([], [1.0, 2.0]):
        with pytest.raises(TensorError, match=rf"exactly one element, got {len(elements)}"):
            unpack_tensor(pb.Tensor(floats=pb.Tensor.FloatArray(array=elements)), "speed")


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [
        ([-1], 4, (4,)),
        ([-1], 0, (0,)),
        ([2, -1], 6, (2, 3)),
        ([-1, 3], 6, (2, 3)),
        ([2, -1, 2], 4, (2, 1, 2)),
        ([2, -1], 0, (2, 0)),
        ([-1], 1, (1,)),
        ([-5, 2], 4, (2, 2)),
    ],
)
def test_one_variable_dimension_is_inferred(shape, count, expected):
    # D-11, D-19
    tensor = pb.Tensor(int32s=pb.Tensor.Int32Array(array=range(count)), shape=shape)
    array = unpack_tensor(tensor)
    assert array.shape == expected
    assert array.ravel().tolist() == list(range(count))


@pytest.mark.parametrize(
    ("shape", "count", "message"),
    [
        ([-1, -1], 4, "2 variable dimensions; at most one"),
        ([2, -1], 5, "5 elements do not fill"),
        ([0, -1], 5, "5 elements do not fill"),
        ([3], 2, r"needs 3 elements \(or one, to fill it\), got 2"),
        ([3], 0, "needs 3 elements"),
        ([0], 1, "needs 0 elements"),
        ([1] * 100, 1, "at most 32 dimensions, got 100"),
        ([-1] + [2**31 - 1] * 32, 2, "at most 32 dimensions, got 33"),
        ([2**20, 2**20], 1, "would fill 4398046511104 bytes"),
    ],
    ids=str,
)
def test_elements_that_do_not_fill_the_shape_are_an_error(shape, count, message):
    # D-11; and a message of a few bytes claims no terabytes
    tensor = pb.Tensor(int32s=pb.Tensor.Int32Array(array=range(count)), shape=shape)
    with pytest.raises(TensorError, match=message):
        unpack_tensor(tensor, "speed")


@every_dtype
def test_a_single_element_fills_the_shape(dtype):
    # D-11: broadcast, also as the public client packs it with try_compress
    tensor = tensor_utils.pack_tensor(np.full((2, 3), 1, dtype), try_compress=True)
    assert len(tensor.SerializeToString()) < 20
    assert identical(unpack_tensor(pb.Tensor.FromString(tensor.SerializeToString())), np.full((2, 3), 1, dtype))


def test_a_single_text_fills_the_shape_as_text():
    array = unpack_tensor(pb.Tensor(strings=pb.Tensor.StringArray(array=["up"]), shape=[2, 2]))
    assert array.dtype == object
    assert array.tolist() == [["up", "up"], ["up", "up"]]


def test_a_tensor_that_holds_nothing_is_an_error_that_names_it():
    with pytest.raises(TensorError, match=r"'seed' holds nothing"):
        unpack_tensor(pb.Tensor(shape=[2]), "seed")


@few
@given(st.data())
def test_truncated_and_garbled_bytes_give_an_array_or_a_tensor_error_and_nothing_else(data):
    array = data.draw(hnp.arrays(st.sampled_from(WIRE_DTYPES), hnp.array_shapes(min_dims=0, max_dims=3)))
    raw = bytearray(pack_tensor(array).SerializeToString())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    tensor = pb.Tensor()
    try:
        tensor.ParseFromString(bytes(raw))
    except Exception:
        return  # the message itself does not parse: the session's business
    spec = Spec.number("a", array.shape, array.dtype)
    for read in (unpack_tensor, spec.read):
        try:
            result = read(tensor)
        except TensorError:
            continue
        assert result.flags.writeable


# Casts


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (300, np.uint8),
        (-1, np.uint8),
        (128, np.int8),
        (1.7, np.int64),
        (1.7, np.bool_),
        (2, np.bool_),
        (-1, np.uint64),
        (2**63, np.int64),
        (2**32, np.uint32),
        (np.uint64(2**64 - 1), np.int64),
        (np.int64(-1), np.uint64),
        (2**53 + 1, np.float64),
        (-(2**53) - 1, np.float64),
        (2**63 - 1, np.float64),
        (np.uint64(2**64 - 1), np.float64),
        (np.uint64(2**53 + 1), np.float64),
        (2**24 + 1, np.float32),
        (2049, np.float16),
        (2.0**63, np.int64),
        (-(2.0**63) - 2048, np.int64),
        (2.0**64, np.uint64),
        (-1.0, np.uint64),
        (np.float32(2.0**31), np.int32),
        (np.float16(np.inf), np.int64),
        (math.nan, np.int64),
        (math.inf, np.int32),
        (math.nan, np.bool_),
        (0.1, np.float32),
        (1e300, np.float32),
        (5e-324, np.float32),
        ([1, 2, 300], np.uint8),
        ([2**53 + 1, 0.5], np.float64),
    ],
    ids=repr,
)
def test_a_cast_that_would_lose_something_is_an_error(value, dtype):
    # D-19, in both directions between int64 and float64 too
    with pytest.raises(TensorError, match="without loss"):
        cast(value, dtype)
    with pytest.raises(TensorError, match="without loss"):
        pack_tensor(value, dtype)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (255, np.uint8),
        (2.0, np.int64),
        (2**53, np.float64),
        (-(2**63), np.float64),
        (2**62, np.float64),
        (np.uint64(2**63), np.float64),
        (-(2.0**63), np.int64),
        (2.0**63 - 1024, np.int64),
        (2.0**64 - 2048, np.uint64),
        (2.0**63, np.uint64),
        (np.float32(2.0**31 - 128), np.int32),
        (np.float16(65504), np.uint16),
        (0.5, np.float16),
        (2048, np.float16),
        (math.inf, np.float16),
        (math.nan, np.float32),
        (True, np.int8),
        (1, np.bool_),
        (0.0, np.bool_),
        (True, np.float64),
        ([], np.uint8),
        (np.array([1, 2], ">i4"), np.int64),
    ],
    ids=repr,
)
def test_a_cast_that_loses_nothing_is_made(value, dtype):
    array = cast(value, dtype)
    assert array.dtype == np.dtype(dtype)
    assert np.array_equal(array, np.asarray(value), equal_nan=np.dtype(dtype).kind == "f")
    tensor = pack_tensor(value, wire_dtype(dtype))
    assert np.array_equal(unpack_tensor(tensor), array, equal_nan=array.dtype.kind == "f")


@few
@given(hnp.arrays(st.sampled_from([np.dtype(c) for c in "?bhilBHILefd"]), 3), st.sampled_from([*"?bhilBHILefd"]))
def test_a_cast_is_exact_or_an_error(array, code):
    try:
        result = cast(array, code)
    except TensorError:
        return
    for before, after in zip(array.tolist(), result.tolist(), strict=True):
        # Python compares an int with a float exactly, NumPy does not.
        assert before == after or (math.isnan(before) and math.isnan(after))


def test_rounding_lets_a_float_lose_digits_and_nothing_else():
    assert cast(0.1, np.float32, rounding=True) == np.float32(0.1)
    assert np.isnan(cast(math.nan, np.float16, rounding=True))
    assert cast(-math.inf, np.float32, rounding=True) == -np.inf
    for value, dtype in ((1e300, np.float32), (70000.0, np.float16), (1.5, np.int64), (2**53 + 1, np.float64)):
        with pytest.raises(TensorError, match="without loss"):
            cast(value, dtype, rounding=True)


@pytest.mark.parametrize("value", ["5", None, b"5", [None], {"a": 1}, 1j, np.datetime64("2020"), ["1", "2"]], ids=repr)
def test_a_cast_of_something_that_is_no_number_says_what_came(value):
    with pytest.raises(TensorError, match=r"expected numbers for int64, got"):
        cast(value, np.int64)


def test_a_cast_to_the_same_dtype_does_not_copy():
    array = np.arange(3.0)
    assert cast(array, np.float64) is array


def test_the_dtypes_of_the_wire_and_the_widened_ones():
    assert [str(dtype) for dtype in WIRE_DTYPES] == [
        *("float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64", "bool")
    ]
    assert [wire_dtype(d) for d in ("float16", "int16", "uint16", ">f8")] == ["float32", "int32", "uint32", "float64"]
    for dtype in (np.complex64, "M8[s]", object, "U3", "V4"):
        with pytest.raises(
            TensorError, match=r"cannot be sent; expected one of float32, float64, .*float16, int16, uint16"
        ):
            wire_dtype(dtype)


# Specs


@every_dtype
def test_a_spec_with_bounds_comes_back_and_reads_like_the_public_one(dtype):
    low, high = np.zeros((2, 2), dtype), np.array([[1, 1], [1, 0]], dtype)
    spec = Spec.number("a.b", (2, 2), dtype, low, high)
    message = spec.to_proto()
    again = Spec.from_proto(pb.TensorSpec.FromString(message.SerializeToString()))
    assert (again.name, again.shape, again.dtype, again.data_type) == ("a.b", (2, 2), dtype, spec.data_type)
    theirs = public.TensorSpec.FromString(message.SerializeToString())
    assert tensor_utils.data_type_to_np_type(theirs.dtype) == dtype
    if dtype.kind == "b":
        assert spec.minimum is spec.maximum is None
        return
    assert again.maximum is not None
    assert identical(again.maximum, high)
    assert np.array_equal(tensor_utils.unpack_proto(theirs.max), high.ravel())
    # D-20: a uniform bound is a scalar; one that is the dtype's own is left out
    if dtype.kind == "u":
        assert again.minimum is None
    else:
        assert again.minimum is not None
        assert again.minimum.shape == ()


@every_dtype
def test_bounds_that_exclude_nothing_are_left_out(dtype):
    # D-20: the dtype's own limits and infinite bounds
    if dtype.kind == "f":
        low, high = -np.inf, np.inf
    elif dtype.kind == "b":
        low, high = False, True
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    message = Spec.number("a", (2,), dtype, np.full(2, low, dtype), np.full(2, high, dtype)).to_proto()
    assert not message.HasField("min")
    assert not message.HasField("max")


def test_a_half_infinite_bound_is_kept_for_each_element():
    spec = Spec.number("a", (2,), np.float32, np.float32([-np.inf, 0]), np.float32([np.inf, np.inf]))
    again = Spec.from_proto(spec.to_proto())
    assert again.minimum is not None
    assert again.minimum.tolist() == [-np.inf, 0.0]
    assert again.maximum is None


def test_bounds_of_a_narrow_dtype_travel_widened():
    spec = Spec.number("a", (), np.int16, np.int16(-32768), np.int16(32767))
    assert spec.dtype == np.int32
    assert (spec.minimum, spec.maximum) == (-32768, 32767)


def test_ranges_are_inclusive_and_an_element_outside_of_them_is_named():
    # D-20
    spec = Spec.number("gear", (3,), np.int32, np.int32([0, 0, -1]), np.int32([5, 5, 5]))
    spec.check_range(np.int32([0, 5, -1]))
    with pytest.raises(
        TensorError, match=r"'gear': expected INT32 of shape \[3\], min \[ 0, 0, -1\].*got 6, which is ab"
    ):
        spec.check_range(np.int32([0, 6, 0]))
    with pytest.raises(TensorError, match=r"got -2, which is below the minimum"):
        spec.check_range(np.int32([0, 0, -2]))
    with pytest.raises(TensorError, match=r"got nan$"):
        Spec.number("x", (), np.float64, np.float64(0)).check_range(np.float64([math.nan]))
    Spec.number("x", (), np.float64).check_range(np.float64([math.nan]))


def test_a_variable_shape_takes_a_scalar_range_only():
    # D-20
    message = Spec.number("a", (-1,), np.int32, np.asarray(0), np.asarray(9)).to_proto()
    spec = Spec.from_proto(message)
    spec.check_range(np.int32([0, 9, 3]))
    with pytest.raises(TensorError, match="got 10"):
        spec.check_range(np.int32([0, 10]))
    message.max.int32s.array.append(9)
    with pytest.raises(TensorError, match=r"\[-1\] has a max of 2 elements"):
        Spec.from_proto(message)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.TensorSpec(name="x"), "unknown data type 0"),
        (pb.TensorSpec(name="x", dtype=99), "unknown data type 99"),
        (pb.TensorSpec(name="x", dtype=pb.INT8, shape=[-1, -1]), "more than one variable dimension"),
        (
            pb.TensorSpec(name="x", dtype=pb.INT8, min=pb.TensorSpec.Value(floats=pb.Tensor.FloatArray(array=[1]))),
            "of int8s, but its min is of floats",
        ),
        (
            pb.TensorSpec(name="x", dtype=pb.INT8, shape=[3], max=pb.TensorSpec.Value(int8s={"array": b"\x01\x02"})),
            "max of 2 elements",
        ),
    ],
)
def test_a_spec_that_cannot_be_says_why(message, text):
    with pytest.raises(TensorError, match=text):
        Spec.from_proto(message)


def test_an_empty_bound_means_none():
    assert Spec.from_proto(pb.TensorSpec(name="x", dtype=pb.INT8, min=pb.TensorSpec.Value())).minimum is None


@pytest.mark.parametrize(
    ("shape", "tensor_shape", "count"),
    [((3,), [3], 3), ((3,), [-1], 3), ((3,), [3], 1), ((2, 3), [2, -1], 6), ((), [], 1), ((-1, 2), [3, 2], 6)],
)
def test_a_spec_reads_its_shape_a_variable_one_and_a_single_element(shape, tensor_shape, count):
    # D-11
    spec = Spec.number("a", shape, np.float32)
    array = spec.read(pb.Tensor(floats=pb.Tensor.FloatArray(array=[1.0] * count), shape=tensor_shape))
    assert array.shape == tuple(3 if size == -1 else size for size in shape)
    assert array.dtype == np.float32
    assert array.flags.writeable
    assert (array == 1).all()


@pytest.mark.parametrize(
    ("shape", "tensor_shape", "count", "message"),
    [
        ((), [1], 1, r"got the shape \[1\]"),
        ((1,), [], 1, r"got the shape \[\]"),
        ((3,), [4], 4, r"got the shape \[4\]"),
        ((3,), [4], 1, r"got the shape \[4\]"),
        ((3,), [1, 3], 3, r"got the shape \[1, 3\]"),
        ((3,), [-1, -1], 3, "variable dimensions"),
        ((3,), [-1], 4, r"got the shape \[-1\]"),
        ((3,), [-1], 1, r"got the shape \[-1\]"),
        ((3,), [3], 2, "needs 3 elements"),
        ((3,), [2**31 - 1, 2**31 - 1], 1, r"got the shape"),
        ((-1,), [2**31 - 1], 1, "would fill"),
    ],
    ids=str,
)
def test_a_spec_refuses_another_shape(shape, tensor_shape, count, message):
    # D-11: a scalar sent as [1] too; and no shape is broadcast before it is looked at
    spec = Spec.number("a", shape, np.float32)
    with pytest.raises(TensorError, match=message):
        spec.read(pb.Tensor(floats=pb.Tensor.FloatArray(array=[1.0] * count), shape=tensor_shape))


def test_a_variable_dimension_beside_one_without_elements_is_none():
    spec = Spec.number("a", (-1, 0), np.float32)
    tensor = pb.Tensor(floats=pb.Tensor.FloatArray(), shape=[-1, 0])
    assert spec.read(tensor).shape == unpack_tensor(tensor).shape == (0, 0)


def test_a_shape_without_end_is_refused_in_few_words():
    endless = [2**31 - 1] * 1000
    message = pb.TensorSpec(name="a", shape=endless, dtype=pb.FLOAT)
    message.min.floats.array.extend([1.0, 2.0])
    with pytest.raises(TensorError, match="'a': expected at most 32 dimensions, got 1000"):
        Spec.from_proto(message)
    with pytest.raises(TensorError, match="got the shape") as caught:
        Spec.number("a", (2,), np.float32).read(pb.Tensor(floats=pb.Tensor.FloatArray(array=[1.0]), shape=endless))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("member", [m for m in MEMBERS if m != "int32s"])
def test_a_spec_refuses_another_dtype(member):
    # D-11
    tensor = pb.Tensor()
    getattr(tensor, member).SetInParent()
    with pytest.raises(TensorError, match=f"'a': expected INT32 of shape .* got a tensor that holds {member}"):
        Spec.number("a", (), np.int32).read(tensor)
    with pytest.raises(TensorError, match="holds nothing"):
        Spec.text("a", ()).read(pb.Tensor())


def test_a_batched_spec_has_a_leading_dimension_in_its_bounds_too():
    spec = Spec.number("a", (2,), np.int32, np.int32([0, 1]), np.asarray(7)).batched(3)
    assert spec.shape == (3, 2)
    assert spec.minimum is not None
    assert spec.minimum.shape == (3, 2)
    assert spec.maximum is not None
    assert spec.maximum.shape == ()
    assert Spec.from_proto(spec.to_proto()).minimum.tolist() == [[0, 1]] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(1,), (64,), (2, 30), (256,), (257,), (300, 2)])
@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "u1", "u4", "u8"])
def test_one_integer_out_of_range_is_found_among_few_and_among_many(dtype, shape):
    limits = np.iinfo(dtype)
    low, high = max(limits.min, -5), 100
    spec = Spec.number("x", (), dtype, np.asarray(low, dtype), np.asarray(high, dtype))
    inside = np.resize(np.array([low, 3, high], dtype), shape)
    spec.check_range(inside)
    spec.check_range(np.zeros((0, *shape[1:]), dtype))
    for wrong, side in ((limits.min, "below the minimum"), (high + 1, "above the maximum"), (limits.max, "above")):
        if low <= wrong <= high:
            continue
        for place in (0, -1):
            array = inside.copy()
            array.flat[place] = wrong
            with pytest.raises(TensorError, match=side):
                spec.check_range(array)
    # One bound alone, and bounds that differ by element.
    for bounds in ((np.asarray(low, dtype), None), (None, np.asarray(high, dtype))):
        Spec.number("x", (), dtype, *bounds).check_range(inside)
    rows = np.resize(np.array([3], dtype), shape)
    own = Spec.number("x", shape, dtype, rows, rows + np.arange(rows.size).reshape(shape).astype(dtype) % 2)
    own.check_range(rows)
    with pytest.raises(TensorError, match="below the minimum"):
        own.check_range(rows - np.asarray(1, dtype))
