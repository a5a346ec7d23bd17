"""`bridge.core.encoding.values`: infos and settings come back as they were, and nothing else gets through."""

import contextlib
import dataclasses
import enum
import math
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.core.encoding import values
from bridge.errors import TensorError
from bridge.pb import bridge_pb2 as pb
from bridge.testing import make_info
from tests.core.encoding.trees import objects, same, trees
from tests.support import stable_id

few = settings(max_examples=80, deadline=None)


def there_and_back(value):
    return values.decode(values.encode(value))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**3999, 1.5, -0.0),
        *(math.nan, math.inf, -math.inf, 5e-324, "", "καλημέρα\0🎲", b"", b"\0\xff"),
        *([], (), {}, [[]], ([],), {"": {}}, [None, (1, [2.0])], {"b": 1, "a": 2}, {"a.b": {"%": (True,)}}),
        *(np.float32(0.1), np.float16(0.1), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True)),
        *(np.str_("ab"), np.str_("")),
        *(np.bytes_(b"ab"), np.complex64(1 + 2j), np.datetime64("2020-01-01T00:00:01.5"), np.timedelta64(3, "h")),
        np.datetime64("NaT", "s"),  # one without a unit is deprecated
        *(np.zeros((0, 3), np.float32), np.zeros(()), np.array(True), np.array([math.nan, -0.0])),
        *(np.array(["a", "bc", ""]), np.array("x"), np.array([b"a", b"bc"]), np.empty((2, 3), "U0")),
        *(np.array(["2020-01-01", "NaT"], "M8[D]"), np.array([25, 50], "m8[25s]"), np.arange(3, dtype=">i4")[::-1]),
        *(objects(None, "a", {"k": np.int8(1)}), objects([1], shape=()), objects(np.array(5), np.zeros(2))),
        objects(1, 2, 3, 4, shape=(2, 2)),
        *(1 + 2j, complex(-0.0, math.inf), set(), {1, "a", (2, None)}, frozenset({1.5}), {frozenset({1}), None}),
        *({1: 2}, {"a": 1, 2: "b", None: 3, (1, "x"): 4, 1.5: 5, b"k": 6, True: 7}, {np.int64(3): 1}),
    ],
    ids=lambda value: f"{type(value).__name__} {stable_id(value):.40}",
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value):
    expected = value.astype(value.dtype.newbyteorder("=")) if isinstance(value, np.ndarray) else value
    if isinstance(value, np.ndarray) and value.dtype.itemsize == 0:
        expected = value.astype("U1")  # NumPy has no arrays of no bytes
    assert same(there_and_back(value), expected)


@few
@given(trees)
def test_any_tree_of_values_comes_back_as_it_was(value):
    assert same(there_and_back(value), value)


def test_the_infos_of_the_test_environments_come_back_without_a_warning():
    generator = np.random.default_rng(0)
    for steps in range(4):
        info = make_info(generator, steps)
        read, notes, form = values.decode_info(values.encode_info(info, values.Notes()))
        assert same(read, info)
        assert notes == []
        assert form is values.UNCHANGED


def test_arrays_come_back_writable_and_unshared():
    data = values.encode([np.arange(3), np.arange(3)])
    one, other = values.decode(data)
    one[:] = 7
    assert other.tolist() == [0, 1, 2]
    assert values.decode(data)[0].tolist() == [0, 1, 2]
    assert values.decode(values.encode({})) is not values.decode(values.encode({}))


def test_subclasses_come_back_as_the_plain_type():
    class Color(enum.IntEnum):
        RED = 3

    class Mine(dict):
        pass

    class Move(enum.Enum):
        UP = (0, 1)
        NAMED = "up"

    class Name(str, enum.Enum):
        A = "a"

    @dataclasses.dataclass
    class Inner:
        x: int

    @dataclasses.dataclass(frozen=True)
    class Outer:
        inner: Inner
        move: Move
        tags: frozenset

    assert same(there_and_back(Color.RED), 3)
    assert same(there_and_back([Move.UP, Move.NAMED, Name.A]), [(0, 1), "up", "a"])
    assert same(there_and_back({Move.UP: 1, Color.RED: 2}), {(0, 1): 1, 3: 2})
    read = there_and_back(Outer(Inner(1), Move.NAMED, frozenset({2})))
    assert same(read, {"inner": {"x": 1}, "move": "up", "tags": frozenset({2})})
    assert same(there_and_back(Mine(a=1)), {"a": 1})
    assert same(there_and_back(bytearray(b"x")), b"x")


def deep(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"value is of type object, which cannot be sent; expected None, bool"),
        ({"a": [1, range(3)]}, r"value\['a'\]\[1\] is of type range"),
        ({range(3): 2}, r"the key of value\[range\(0, 3\)\] is of type range"),
        ({Frozen(1): 2}, r"the key of value\[.*\]: a set cannot hold what travels"),
        ({Frozen(1)}, r"value\{.*\}: a set cannot hold what travels"),
        (np.zeros(2, "i4,f8"), "which cannot be sent"),
        (objects(1, object()), r"value\[1\] is of type object"),
        (np.ma.array([1, 2], mask=[0, 1]), "masked array"),
        ("\ud800", "UTF-8 cannot encode"),
        ({"\ud800": 1}, r"the key of value\[.*\] is text that UTF-8 cannot encode"),
        (10**5000, "an int of 16610 bits, more than the 13287 that travel"),
        (deep(40), "nested more than 32 levels"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else type(value).__name__,
)
def test_what_does_not_travel_is_refused_with_its_place(value, message):
    with pytest.raises(TensorError, match=message):
        values.encode(value)


def test_the_deepest_nesting_comes_back_and_a_cycle_is_an_error():
    assert there_and_back(deep(32)) == deep(32)
    cycle = []
    cycle.append(cycle)
    with pytest.raises(TensorError, match="nested more than 32"):
        values.encode(cycle)


def test_an_info_leaves_out_what_does_not_travel_and_tells_the_receiver_once():
    notes = values.Notes()
    info = {
        "good": 1,
        "engine": object(),
        "inner": {"x": 2, "bad": {3, range(3)}},
        "listed": [1, object(), 2.5, object()],
        "array": objects(1, object()),
        range(2): 6,
        "\ud800": 1,
    }
    read, told, _ = values.decode_info(values.encode_info(info, notes))
    assert same(
        read,
        {"good": 1, "inner": {"x": 2, "bad": {3}}, "listed": [1, None, 2.5, None], "array": objects(1, None)},
    )
    assert len(told) == 6
    assert told[0].startswith("left out, for it does not travel: info['engine'] is of type object")
    assert told[2].startswith("None stands for what does not travel: info['listed'][1] is of type object")
    for place in ("info['inner']['bad']{range(0, 3)}", "info['array'][1]", "info[range(0, 2)]", "info['\\ud800']"):
        assert sum(place in text for text in told) == 1
    again, told, _ = values.decode_info(values.encode_info(info, notes))
    assert same(again, read)
    assert told == []


def test_an_info_with_ever_new_keys_that_do_not_travel_notes_a_hundred_of_them():
    notes = values.Notes()
    told = []
    for step in range(300):
        told += values.decode_info(values.encode_info({f"key {step}": object()}, notes))[1]
    assert len(told) == 100


@pytest.mark.parametrize("form", [None, [[1, 0], [None, "int"]]])
def test_the_form_of_observations_travels_beside_an_info(form):
    assert values.decode_info(values.encode_info({}, values.Notes(), form)) == ({}, [], form)
    assert values.decode(values.encode_info({"a": 1}, values.Notes(), form)) == {"a": 1}


def test_the_infos_of_lanes_are_a_list_of_dicts():
    infos = [{"a": 1}, {}, {"a": 2.5}]
    assert same(values.decode(values.encode_info(infos, values.Notes())), infos)
    assert values.decode(values.encode_info({}, values.Notes())) == {}


@few
@given(st.data())
def test_truncated_and_garbled_bytes_are_a_value_or_a_tensor_error_and_nothing_else(data):
    raw = bytearray(values.encode(data.draw(trees)))
    if raw and data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    for _ in range(data.draw(st.integers(0, 3)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TensorError):
        values.decode(bytes(raw))


def array_message(**fields):
    return pb.Value(array=pb.Value.Array(**fields))


ALIKE = [pb.Value(big_integer=str(number * sys.hash_info.modulus)) for number in range(1001)]
# NumPy hashes no span of time without a unit.
UNHASHABLE = array_message(dtype="<m8", data=b"\x05" + bytes(7), is_scalar=True)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.Value(), "empty message"),
        (pb.Value(dict=pb.Value.Dict(keys=["a"])), "1 keys and 0 values"),
        (
            pb.Value(dict=pb.Value.Dict(any_keys=[pb.Value(list=pb.Value.List())], values=[pb.Value(integer=1)])),
            "a dict",
        ),
        (pb.Value(set=pb.Value.List(items=[pb.Value(list=pb.Value.List())])), "a set cannot hold"),
        pytest.param(
            pb.Value(set=pb.Value.List(items=[UNHASHABLE])),
            "a set cannot hold",
            marks=pytest.mark.skipif(np.__version__ < "2", reason="this NumPy hashes spans of time without a unit"),
        ),
        (pb.Value(frozenset=pb.Value.List(items=ALIKE)), "a frozenset cannot hold .* have the same hash"),
        (pb.Value(dict=pb.Value.Dict(any_keys=ALIKE, values=ALIKE)), "a dict cannot hold .* have the same hash"),
        (pb.Value(big_integer="--5"), "integer in decimal"),
        (pb.Value(big_integer="1" * 5000), "integer in decimal"),
        (pb.Value(big_integer=""), "integer in decimal"),
        (pb.Value(big_integer="٣"), "integer in decimal"),
        (array_message(dtype="O", shape=[1], data=b"12345678"), "this dtype is not allowed"),
        (array_message(dtype="i4,,", shape=[0]), "this dtype is not allowed"),
        (array_message(dtype="(9,)i4", shape=[0]), "this dtype is not allowed"),
        (array_message(dtype="", shape=[0]), "this dtype is not allowed"),
        (array_message(dtype="<f3", shape=[1], data=b"123"), "cannot be read"),
        (array_message(dtype="<M8[abc]", shape=[0]), "cannot be read"),
        (array_message(dtype="<f4", shape=[1], data=b"123"), "cannot be read"),
        (array_message(dtype="<f4", shape=[2], data=b"1234"), "cannot be read"),
        (array_message(dtype="<f4", shape=[-1], data=b"1234"), "dimension is negative"),
        (array_message(dtype="<f4", shape=[1] * 100, data=b"1234"), "cannot be read"),
        (array_message(dtype="object", shape=[2**40]), "cannot be read"),
        (array_message(dtype="<U0", shape=[2**62] * 65), "more than 64 dimensions"),
        (array_message(dtype="<U0", shape=[10**13]), "more than 65536 elements without any bytes"),
        (array_message(dtype="<U1", data=b"\xff\xff\xff\xff", is_scalar=True), "no characters"),
        (array_message(dtype="|b1", shape=[1], data=b"\x02"), "neither true nor false"),
    ],
    ids=lambda value: f"{value!r:.40}".replace("\n", " "),
)
def test_a_message_that_is_no_value_says_why(message, text):
    with pytest.raises(TensorError, match=text):
        values.decode(message.SerializeToString())


def test_a_message_nested_too_deep_is_refused():
    message = pb.Value(integer=1)
    for _ in range(40):
        message = pb.Value(list=pb.Value.List(items=[message]))
    with pytest.raises(TensorError, match="nested more than 32"):
        values.from_value(message)


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(TensorError, match="expected an encoded value, got 3 bytes"):
        values.decode(b"\xff\xff\xff")


def test_nothing_is_ever_unpickled():
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    with pytest.raises(TensorError, match="Bomb"):
        values.encode(Bomb())
    message = array_message(dtype="|O", shape=[1], data=pickle.dumps(Bomb()))
    with pytest.raises(TensorError):
        values.decode(message.SerializeToString())


@pytest.mark.parametrize(
    "value",
    [{str(number): 0 for number in range(100_000)}, {"a": [[0] * 50_000, (0,) * 50_000]}, [set(range(100_000))]],
    ids=["keys", "lists", "set"],
)
@pytest.mark.slow
def test_what_a_client_sends_holds_no_more_values_than_are_soon_read(value):
    data = values.encode(value)
    assert same(values.decode(data), value)
    with pytest.raises(TensorError, match="expected at most 100000 values, got more; send numbers as NumPy arrays"):
        values.decode_request(data)


def test_the_infos_of_a_large_batch_are_read_one_by_one_too():
    """As clients of this package send them that know of no columns."""
    batch = [{f"metric {key}": key / 7 for key in range(15)} for _ in range(4096)]
    assert same(values.decode_request(values.encode(batch)), batch)


def test_what_is_no_message_is_refused_before_or_while_it_is_read():
    for seed in range(200):
        data = np.random.default_rng(seed).bytes(120_000)
        with pytest.raises(TensorError):
            values.decode_request(data)
    for data in (b"\xff" * 120_000, b"\x52" + b"\xff" * 120_000, b"\x52\x80\x80\x04" + b"\x0a\xff" * 60_000):
        with pytest.raises(TensorError):
            values.decode_request(data)


def test_keys_without_values_are_counted_too():
    message = pb.Value(dict=pb.Value.Dict(keys=["k"] * 500_000))
    with pytest.raises(TensorError, match="at most 100000 values"):
        values.decode_request(message.SerializeToString())


def test_values_cannot_be_hidden_from_the_count():
    """A group, which protobuf skips, would shift what a careless reader of the wire takes for fields."""
    many = pb.Value(list=pb.Value.List(items=[pb.Value(boolean=True)] * 120_000)).SerializeToString()
    hidden = [
        bytes((100 << 3 & 0x7F | 3 | 0x80, 100 >> 4, 100 << 3 & 0x7F | 4 | 0x80, 100 >> 4)) + many,
        b"\x0d" + bytes(4) + many,  # the field `none` as four bytes
        b"\xc9\x06" + bytes(8) + many,  # an unknown field of eight bytes
    ]
    for data in hidden:
        assert len(pb.Value.FromString(data).list.items) == 120_000
        with pytest.raises(TensorError):
            values.decode_request(data)


def test_numbers_in_an_array_are_one_value():
    value = {"a": np.zeros(200_000), "b": list(range(99_900))}
    assert same(values.decode_request(values.encode(value)), value)


def test_an_info_that_contains_itself_twice_is_encoded_at_once():
    info = {"good": 1, "inner": {"x": 2}}
    info["inner"]["up"] = info["inner"]["top"] = info["inner"]["listed"] = [info, info]
    read, told, _ = values.decode_info(values.encode_info(info, values.Notes()))
    assert same(read, {"good": 1, "inner": {"x": 2}})
    assert len(told) == 3
    assert all("info['inner']" in text and "nested more than" in text for text in told)
    # The infos of lanes are a list of such dicts, each of which stays one.
    read, told, _ = values.decode_info(values.encode_info([info, {"y": 3}], values.Notes()))
    assert same(read, [{"good": 1}, {"y": 3}])
    assert len(told) == 1


@pytest.mark.parametrize("size", [0, 40, 100, 127, 128, 20_000])
def test_an_info_that_tells_of_beginnings_alone_is_read_as_any_other(size):
    begun = pb.Value.Begun(lanes=[0, 3, 300], rows=[bytes(size)])
    data = values.EMPTY_DICT + pb.Value(begun=begun).SerializeToString()
    plain = values.decode_step_info(data)
    assert (plain.info, plain.notes, plain.failed, plain.begun) == ({}, (), (), begun)
    assert plain.form is values.UNCHANGED
    # What follows is read too, and so are further beginnings, which protobuf merges.
    more = values.decode_step_info(data + pb.Value(failed=[3], notes=["look"]).SerializeToString())
    assert (list(more.failed), list(more.notes), more.begun) == ([3], ["look"], begun)
    twice = values.decode_step_info(data + pb.Value(begun=begun).SerializeToString())
    assert list(twice.begun.lanes) == [0, 3, 300] * 2
    for wrong in (data[:-1], data[: len(values.EMPTY_DICT) + 2], data + b"\xff"):
        with pytest.raises(TensorError):
            values.decode_step_info(wrong)
