"""`bridge.core.encoding.spaces`: every space to and from tensors: samples, lanes, columns, bad actions (D-11, D-24)."""

import copy
import math

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public
from dm_env_rpc.v1 import spec_manager
from gymnasium import spaces
from gymnasium.spaces import GraphInstance
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from bridge.core.encoding import values
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Spec, pack_tensor
from bridge.errors import InvalidActionError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import EVERY_SPACE
from tests.support import ordered_dict

every_space = pytest.mark.parametrize("name", EVERY_SPACE)
# Gymnasium itself cannot step these in lanes.
UNBATCHED = {"dict_int_keys", "dict_int_and_text_keys"}


def samples(name, count, seed=0):
    space = EVERY_SPACE[name]()
    space.seed(seed)
    return space, [declared(space, space.sample()) for _ in range(count)]


def declared(space, value):
    """A sample with arrays where a Box is: samples of an integer Box of shape () are scalars."""
    if isinstance(space, spaces.Box):
        return np.asarray(value)
    if isinstance(space, spaces.Dict):
        return {key: declared(part, value[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(declared(part, item) for part, item in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Sequence) and not space.stack:
        return tuple(declared(space.feature_space, item) for item in value)
    if isinstance(space, spaces.OneOf):
        return value[0], declared(space.spaces[value[0]], value[1])
    return value


def same(one, other):
    """True if two samples have the same types, dtypes, shapes, keys in order, and bits."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
            return False
        if one.dtype == object or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.tobytes() == other.tobytes()
    if isinstance(one, GraphInstance):
        return isinstance(other, GraphInstance) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def over_the_wire(specs, arrays):
    """The arrays after they were messages, read by the specs after those were messages."""
    read = []
    for spec, array in zip(specs, arrays, strict=True):
        spec = Spec.from_proto(pb.TensorSpec.FromString(spec.to_proto().SerializeToString()))
        tensor = pb.Tensor.FromString(pack_tensor(array).SerializeToString())
        if array.dtype == object and not array.size:
            tensor.strings.SetInParent()
        read.append(spec.read(tensor))
        spec.check_range(read[-1])
    return read


@every_space
def test_a_sample_of_every_space_comes_back_exactly(name):
    space, drawn = samples(name, 20)
    layout = Layout(space, "observation")
    for sample in drawn:
        arrays = layout.pack(copy.deepcopy(sample))
        read = layout.unpack(over_the_wire(layout.specs, arrays), check=True)
        assert same(read, sample)
        assert space.contains(read)


NESTED = spaces.Dict(
    b=spaces.Discrete(3),
    a=spaces.Dict(y=spaces.Box(0, 1, (1,)), x=spaces.Discrete(2)),
    t=spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))),
)
NESTED.seed(5)


@pytest.mark.parametrize(
    ("space", "sample"),
    [
        (spaces.Discrete(3), 1),
        (spaces.Discrete(3), np.int64(1)),
        (spaces.Discrete(2), True),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), (1, np.int64(0))),
        (NESTED, NESTED.sample()),
        (NESTED, {"t": (0, np.int64(1)), "a": {"x": 1, "y": np.zeros(1, np.float32)}, "b": np.int64(2)}),
        (NESTED, {"a": {"y": np.zeros(1, np.float32), "x": np.int64(1)}, "b": 2, "t": (np.int64(0), np.int64(1))}),
    ],
    ids=repr,
)
def test_a_sample_comes_back_with_its_own_order_of_keys_and_plain_integers(space, sample):
    layout = Layout(space, "observation")
    form = values.decode(values.encode(layout.form(sample)))
    assert same(layout.unpack(layout.pack(sample), form=form), sample)


@every_space
def test_samples_of_gymnasium_are_as_their_space_says(name):
    space, drawn = samples(name, 3)
    assert [Layout(space, "observation").form(sample) for sample in drawn] == [None] * 3


@pytest.mark.parametrize(
    "form",
    [
        "text",
        5,
        [],
        [[0], []],
        [[0, 0, 1], [None] * 3],
        [[2, 1, 0], None],
        [[2, 1, 0], ["int", "int", "int"]],
        [[0, 1, 2], [None, None, [None, ["int"]]]],
        [[0, 1, 2], [None, None, [None, ["int"] * 3]]],
    ],
    ids=repr,
)
def test_a_form_that_is_none_is_an_error(form):
    layout = Layout(NESTED, "observation")
    with pytest.raises(TensorError, match=r"the form .* is not one of"):
        layout.unpack(layout.pack(NESTED.sample()), form=form)


@every_space
def test_lanes_of_every_space_come_back_as_gymnasium_batches_them(name):
    space, drawn = samples(name, 4)
    if name in UNBATCHED:
        pytest.skip("Gymnasium cannot batch it")
    batch = concatenate(space, drawn, create_empty_array(space, 4))
    layout = Layout(space, "observation", lanes=4)
    read = layout.unpack(over_the_wire(layout.specs, layout.pack(batch)), check=True)
    assert same(read, batch)
    assert batch_space(space, 4).contains(read)


@every_space
def test_columns_filled_slot_by_slot_give_gymnasiums_batch_and_each_row(name):
    space, drawn = samples(name, 3)
    layout = Layout(space, "observation")
    columns = layout.columns(3)
    for slot in (2, 0, 1):
        arrays = over_the_wire(layout.specs, layout.pack(drawn[slot]))
        for index, array in enumerate(arrays):
            layout.write(columns, index, slot, array)
    for slot, sample in enumerate(drawn):
        assert same(layout.row(columns, slot), sample)
    if name not in UNBATCHED:
        assert same(layout.batch(columns), concatenate(space, drawn, create_empty_array(space, 3)))


@every_space
def test_lanes_are_written_into_a_slice_of_the_columns(name):
    space, drawn = samples(name, 5)
    if name in UNBATCHED:
        pytest.skip("Gymnasium cannot batch it")
    layout = Layout(space, "observation", lanes=2)
    columns = layout.columns(5)
    for start in (0, 3, 2):  # the last one writes over a lane of the one before
        batch = concatenate(space, drawn[start : start + 2], create_empty_array(space, 2))
        for index, array in enumerate(over_the_wire(layout.specs, layout.pack(batch))):
            layout.write(columns, index, start, array)
    for slot in range(5):
        assert same(layout.row(columns, slot), drawn[slot])


def test_a_row_shares_no_memory_with_the_columns():
    layout = Layout(spaces.Dict(a=spaces.Box(0, 1, (2,)), b=spaces.Discrete(3)), "observation")
    columns = [np.zeros((2, 2), np.float32), np.zeros(2, np.int64)]
    row = layout.row(columns, 0)
    row["a"][:] = 1
    columns[1][:] = 2
    assert not columns[0].any()
    assert row["b"] == 0
    assert row["a"].flags.writeable


@every_space
def test_actions_of_every_space_pass_one_by_one_and_as_a_batch(name):
    space, drawn = samples(name, 3)
    layout = Layout(space, "action")
    single = [layout.pack_action(action) for action in drawn]
    for arrays, action in zip(single, drawn, strict=True):
        assert same(layout.unpack(over_the_wire(layout.specs, arrays), check=True), action)
    if name in UNBATCHED:
        return
    batch = concatenate(space, drawn, create_empty_array(space, 3))
    columns = layout.split(batch, 3)
    for slot, action in enumerate(drawn):
        assert same(layout.unpack(over_the_wire(layout.specs, layout.pack_columns(columns, slot))), action)
    lanes = Layout(space, "action", lanes=2)
    columns = lanes.split(batch, 3)
    read = lanes.unpack(over_the_wire(lanes.specs, lanes.pack_columns(columns, 1)))
    assert same(read, concatenate(space, drawn[1:], create_empty_array(space, 2)))


# Specs


@every_space
@pytest.mark.parametrize("lanes", [None, 2])
def test_spec_names_are_unique_and_nest_by_dots_only(name, lanes):
    # D-7: never both `a` and `a.b`; the public client reads the specs too
    layout = Layout(EVERY_SPACE[name](), "observation", lanes)
    names = [spec.name for spec in layout.specs]
    assert len(set(names)) == len(names)
    for one in names:
        assert not any(other.startswith(f"{one}.") for other in names)
        assert one == "observation" or one.startswith("observation.")
    specs = {uid: spec.to_proto() for uid, spec in enumerate(layout.specs, 1)}
    theirs = {uid: public.TensorSpec.FromString(spec.SerializeToString()) for uid, spec in specs.items()}
    assert set(spec_manager.SpecManager(theirs).names()) == set(names)


def test_keys_are_written_so_that_no_two_are_alike():
    keys = ["a.b", "a%2Eb", "", "_", "%_", "%", "%25", *range(30), (1, "a"), None]
    space = spaces.Dict([(key, spaces.Discrete(2)) for key in keys])
    names = [spec.name for spec in Layout(space, "action").specs]
    assert len(set(names)) == len(keys)
    assert names[:3] == ["action.a%2Eb", "action.a%252Eb", "action.%_"]
    assert all(name.count(".") == 1 for name in names)


def test_specs_say_dtype_shape_and_range():
    space = ordered_dict(
        {
            "box": spaces.Box(np.float32([-1, 0]), np.float32([1, np.inf])),
            "image": spaces.Box(0, 255, (2, 3), np.uint8),
            "gear": spaces.Discrete(4, start=-2),
            "small": spaces.Box(-5, 5, (1,), np.int16),
            "multi": spaces.MultiDiscrete([3, 4], start=[-1, 10]),
            "bits": spaces.MultiBinary(3),
            "flag": spaces.Box(0, 1, (), np.bool_),
            "text": spaces.Text(5),
            "seq": spaces.Sequence(spaces.Box(0, 9, (2,), np.int32)),
            "words": spaces.Sequence(spaces.Text(3)),
            "uneven": spaces.Sequence(spaces.Box(np.float32([0, 1]), np.float32([2, 2]))),
            "graph": spaces.Graph(spaces.Discrete(2), None),
        }.items()
    )
    assert [f"{spec.name} {spec.describe()}" for spec in Layout(space, "o").specs] == [
        "o.box FLOAT of shape [2], min [-1., 0.], max [ 1., inf]",
        "o.image UINT8 of shape [2, 3]",  # D-20: the dtype's own limits are left out
        "o.gear INT64 of shape [], min -2, max 1",
        "o.small INT32 of shape [1], min -5, max 5",
        "o.multi INT64 of shape [2], min [-1, 10], max [ 1, 13]",
        "o.bits INT8 of shape [3], min 0, max 1",
        "o.flag BOOL of shape []",
        "o.text STRING of shape []",
        "o.seq INT32 of shape [-1, 2], min 0, max 9",
        "o.words STRING of shape [-1]",
        "o.uneven FLOAT of shape [-1, 2], max 2.",  # D-20: only scalar ranges beside a variable dimension
        "o.graph UINT8 of shape [-1]",
    ]
    lanes = {spec.name: spec.describe() for spec in Layout(space, "o", lanes=4).specs}
    assert lanes["o.gear"] == "INT64 of shape [4], min -2, max 1"
    assert lanes["o.multi"].startswith("INT64 of shape [4, 2], min [[-1, 10],")
    assert lanes["o.text"] == "STRING of shape [4]"
    assert lanes["o.seq"] == "UINT8 of shape [-1]"


def test_a_dtype_that_does_not_travel_is_refused():
    with pytest.raises(TensorError, match="cannot be sent"):
        Layout(spaces.Box(-1, 1, (2,), np.longdouble), "observation")


# What a sample may not be


@pytest.mark.parametrize(
    ("space", "sample", "message"),
    [
        (spaces.Box(0, 1, (2,)), np.zeros(3, np.float32), r"'o': expected the shape \(2,\), got \(3,\)"),
        (spaces.Box(0, 1, (2,), np.uint8), [0, 300], "'o': 300 .* does not fit uint8"),
        (spaces.Box(0, 1, (2,)), None, "expected numbers for float32, got NoneType None"),
        (spaces.Box(0, 1, (2,)), [[1], [1, 2]], "ragged"),
        (spaces.Box(-np.inf, np.inf, (1,)), [1e300], "1e\\+300 .* does not fit float32"),
        (spaces.Discrete(3), [1], r"expected a single integer, got the shape \(1,\)"),
        (spaces.Discrete(3), 1.5, "does not fit int64"),
        (spaces.Text(3), 5, "expected text, got 5 of type int"),
        (spaces.Text(3), ["a", "b"], "expected text"),
        (spaces.Dict(a=spaces.Discrete(2)), {"b": 1}, r"'o.a': expected something with the key 'a', got keys \['b'\]"),
        (spaces.Dict(a=spaces.Discrete(2)), 3, "with the key 'a', got 3"),
        (spaces.Tuple([spaces.Discrete(2)] * 2), (1,), r"'o.1': expected something with the key 1, got \(1,\)"),
        (spaces.Sequence(spaces.Box(0, 1, (2,))), None, "'o': expected numbers"),
        (spaces.Sequence(spaces.Text(2)), None, "'o': expected an element of Sequence"),
        (spaces.Sequence(spaces.Box(0, 1, (2,))), [[1, 2, 3]], r"expected items of the shape \(2,\), got \(3,\)"),
        (spaces.Sequence(spaces.Box(0, 1, (2,))), [[1], [2, 3]], "ragged"),
        (spaces.Sequence(spaces.Text(2)), ("a", 1), "expected text, got 1"),
        (spaces.Graph(spaces.Discrete(2), None), None, "'o': expected an element of Graph.*NoneType"),
        (spaces.OneOf([spaces.Discrete(2)]), (5, 1), "'o': expected an element of OneOf.*IndexError"),
        (spaces.OneOf([spaces.Discrete(2)]), 5, "'o': expected an element of OneOf"),
        (spaces.OneOf([spaces.Discrete(2)]), (0, 1.5), "does not fit int64"),
    ],
    ids=str,
)
def test_an_observation_of_another_structure_is_an_error_that_names_the_part(space, sample, message):
    with pytest.raises(TensorError, match=message):
        Layout(space, "o").pack(sample, rounding=True)


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (spaces.Box(-1, 1, (2,)), np.zeros(3), r"expected the shape \(2,\), got \(3,\)"),
        (spaces.Box(-1, 1, (1,)), 0.5, r"expected the shape \(1,\), got \(\)"),
        (spaces.Box(-1, 1, (1,)), [2.0], r"min -1., max 1., got 2.0, which is above the maximum"),
        (spaces.Box(-1, 1, (1,)), [np.nan], r"got nan$"),
        (spaces.Box(-1, 1, (1,)), "left", "expected numbers for float32, got str 'left'"),
        (spaces.Box(-np.inf, np.inf, (1,)), [1e300], "does not fit float32"),
        (spaces.Box(0, 9, (1,), np.uint8), [300], "does not fit uint8"),
        (spaces.Box(0, 9, (1,), np.int16), [10], "got 10, which is above"),
        (spaces.Discrete(2), 2, "INT64 of shape .*, min 0, max 1, got 2, which is above the maximum"),
        (spaces.Discrete(2, start=5), 0, "got 0, which is below the minimum"),
        (spaces.Discrete(2), 1.0, r"expected integers \(int64\), got 1.0"),
        (spaces.Discrete(2), [1], "expected a single integer"),
        (spaces.Discrete(2), None, "expected numbers"),
        (spaces.MultiBinary(2), [0, 2], "got 2, which is above"),
        (spaces.MultiDiscrete([2, 3]), [1, 3], r"max \[1, 2\], got 3"),
        (spaces.MultiDiscrete([2, 3]), [[1], [1, 2]], "ragged"),
        (spaces.Text(3, charset="ab"), "abc", "expected an element of Text"),
        (spaces.Text(3), 3, "expected an element of Text"),
        (spaces.Dict(a=spaces.Discrete(2)), {}, r"expected a dict with the keys \['a'\], got the keys \[\]"),
        (spaces.Dict(a=spaces.Discrete(2)), {"a": 1, "b": 1}, r"with the keys \['a'\], got the keys \['a', 'b'\]"),
        (spaces.Dict(a=spaces.Discrete(2)), 1, "expected a dict with the keys .* got 1"),
        (spaces.Dict(), {"a": 1}, "got the keys"),
        (spaces.Tuple([spaces.Discrete(2)] * 2), (1, 1, 1), r"expected a tuple of 2 parts, got \(1, 1, 1\)"),
        (spaces.Tuple([spaces.Discrete(2)] * 2), 1, "expected a tuple of 2 parts, got 1"),
        (spaces.Tuple([spaces.Discrete(2)] * 2), np.array(1), "expected a tuple of 2 parts, got array"),
        (spaces.Dict(a=spaces.Tuple([spaces.Discrete(2)])), {"a": ()}, r"'action.a': expected a tuple of 1 parts"),
        (spaces.Sequence(spaces.Discrete(2)), (0, 5), "expected an element of Sequence"),
        (spaces.Sequence(spaces.Text(3), stack=True), 5, "expected an element of Sequence"),
        (spaces.Graph(spaces.Discrete(2), None), 5, "expected an element of Graph"),
        (spaces.OneOf([spaces.Discrete(2)]), (1, 0), "expected an element of OneOf"),
        (spaces.OneOf([spaces.Discrete(2)]), ("x", 0), "expected an element of OneOf"),
    ],
    ids=str,
)
def test_an_action_that_is_none_of_its_space_says_what_was_expected_and_what_came(space, action, message):
    # D-11, at the sender's end
    with pytest.raises(InvalidActionError, match=f"(?s)the action .* is not in .*{message}"):
        Layout(space, "action").pack_action(action)


@pytest.mark.parametrize(
    ("space", "batch", "message"),
    [
        (spaces.Box(-1, 1, (2,)), np.zeros((2, 2)), r"expected the shape \(3, 2\), got \(2, 2\)"),
        (spaces.Box(-1, 1, (2,)), np.full((3, 2), 2), "got 2.0, which is above"),
        (spaces.Discrete(2), 1, r"expected the shape \(3,\), got \(\)"),
        (spaces.Discrete(2), [0, 1, 2], "got 2, which is above"),
        (spaces.Discrete(2), [0, 1, 0.0], "expected integers"),
        (spaces.Discrete(2), [0, 1, None], "expected numbers"),
        (spaces.MultiDiscrete([2, 2]), [[0], [1, 0], [1]], "ragged"),
        (spaces.Text(3), 5, "expected a tuple of 3 items, got 5"),
        (spaces.Text(3), "abc", "expected a tuple of 3 items, got 'abc'"),
        (spaces.Text(3), np.array("a"), "expected a tuple of 3 items"),
        (spaces.Text(3), ("a", "b"), "expected 3 items, got 2"),
        (spaces.Text(3), ("a", "b", 5), "expected an element of Text.* got 5"),
        (spaces.Dict(a=spaces.Discrete(2)), {"a": [0, 1, 0], "b": 1}, "got the keys"),
        (spaces.Dict(a=spaces.Discrete(2)), [{"a": 0}] * 3, "expected a dict with the keys"),
        (spaces.Tuple([spaces.Discrete(2)] * 2), ([0, 0, 0],), "expected a tuple of 2 parts"),
        (spaces.Graph(spaces.Discrete(2), None), (None,) * 3, "expected an element of Graph"),
    ],
    ids=str,
)
def test_a_batch_of_actions_that_is_none_says_what_was_expected_and_what_came(space, batch, message):
    with pytest.raises(InvalidActionError, match=f"(?s)the actions are not 3 of .*{message}"):
        Layout(space, "action").split(batch, 3)


@pytest.mark.parametrize("action", [0.1, np.float64(0.1), np.float32(0.1), 1, True, np.int8(1)], ids=repr)
def test_numbers_of_other_dtypes_are_cast_where_only_digits_are_lost(action):
    array = Layout(spaces.Box(-1, 1, ()), "action").pack_action(action)[0]
    assert array.dtype == np.float32
    assert array == np.float32(action)


def test_integers_of_any_dtype_are_actions_of_a_discrete():
    layout = Layout(spaces.Discrete(3), "action")
    for action in (2, np.int8(2), np.uint64(2), np.array(2)):
        assert same(layout.pack_action(action)[0], np.array(2))
    assert layout.split((0, 1, 2), 3)[0].tolist() == [0, 1, 2]


# What comes from the network


@pytest.mark.parametrize("lanes", [None, 1])
def test_encoded_actions_of_more_values_than_are_soon_read_are_refused(lanes):
    layout = Layout(spaces.Sequence(spaces.Sequence(spaces.Discrete(2))), "action", lanes)
    array = np.frombuffer(values.encode([None] * 10_000), np.uint8)
    with pytest.raises(TensorError, match="at most 10000 values, got more"):
        layout.unpack([array], check=True)


def test_each_lane_may_send_as_many_values_as_a_single_environment():
    sample = ((),) * 6000
    layout = Layout(spaces.Sequence(spaces.Sequence(spaces.Discrete(2))), "action", 2)
    assert same(layout.unpack(layout.pack((sample, sample)), check=True), (sample, sample))


@pytest.mark.parametrize(
    ("space", "array"),
    [
        (spaces.Text(3, charset="ab"), np.array("abz", object)),
        (spaces.Text(3), np.array("abcd", object)),
        (spaces.Sequence(spaces.Discrete(2)), np.array([0, 7])),
        (spaces.Graph(spaces.Discrete(2), None), values.encode([np.array([7]), None, None])),
        (spaces.OneOf([spaces.Discrete(2)]), values.encode([0, 9])),
        (spaces.OneOf([spaces.Discrete(2)]), values.encode([3, 0])),
        (spaces.OneOf([spaces.Discrete(2)]), values.encode([1 << 70, 0])),
        (spaces.OneOf([spaces.Discrete(2)]), values.encode([math.inf, 0])),
        (spaces.OneOf([spaces.Discrete(2)]), values.encode(None)),
        (spaces.Graph(spaces.Discrete(2), None), values.encode([1])),
        (spaces.Graph(spaces.Discrete(2), None), b"\xff\xff"),
        (spaces.Sequence(spaces.Sequence(spaces.Discrete(2))), values.encode(5)),
        (spaces.Box(-np.inf, np.inf, (), np.float16), np.float32(1e10)),
        (spaces.Box(-np.inf, np.inf, (), np.float16), np.float32(-1e10)),
    ],
    ids=str,
)
@pytest.mark.parametrize("lanes", [None, 1])
def test_what_no_spec_excludes_is_checked_where_it_arrives(space, array, lanes):
    # D-19: texts, sequences, encoded values and widened floats
    layout = Layout(space, "action", lanes)
    if isinstance(array, bytes):
        if lanes and array != b"\xff\xff":
            array = values.encode([values.decode(array)])
        array = np.frombuffer(array, np.uint8).copy()
    elif lanes and isinstance(space, spaces.Sequence):
        array = np.frombuffer(values.encode([array.tolist()]), np.uint8).copy()
    elif lanes:
        array = array[None]
    with pytest.raises(TensorError):
        layout.unpack([array], check=True)


def test_a_list_of_another_length_than_the_lanes_is_refused():
    layout = Layout(spaces.Graph(spaces.Discrete(2), None), "observation", lanes=2)
    for plain in ([], [[None, None, None]], {"a": 1}):
        with pytest.raises(TensorError, match="expected a list of 2 values"):
            layout.unpack([np.frombuffer(values.encode(plain), np.uint8)])


# Another server's specs
