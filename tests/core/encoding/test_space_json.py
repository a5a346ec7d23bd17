"""`bridge.core.encoding.space_json`: a space comes back exactly, with the flags and orders by which it samples."""

import json
import string
import warnings

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bridge.core.encoding.space_json import published_space, register_space, space_from_json, space_to_json
from bridge.errors import SettingError, TensorError, UnsupportedSpaceError
from bridge.testing import EVERY_SPACE, digest
from tests.support import layout_of, ordered_dict, sampled, stable_id, without_readers

every_space = pytest.mark.parametrize("name", EVERY_SPACE)
few = settings(max_examples=60, deadline=None)


def there_and_back(space):
    text = space_to_json(space)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return space_from_json(text)


def exact(one, other):
    """True if two spaces agree in everything; `Box.__eq__` is but `allclose` and looks at no flags."""
    assert type(one) is type(other)
    assert one == other
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    if isinstance(one, spaces.Box):
        for name in ("low", "high", "bounded_below", "bounded_above"):
            left, right = getattr(one, name), getattr(other, name)
            assert left.dtype == right.dtype
            assert left.shape == right.shape
            assert (left == right).all()
    elif isinstance(one, spaces.Discrete):
        assert (one.n, one.start) == (other.n, other.start)
        assert type(one.n) is type(other.n)
    elif isinstance(one, spaces.MultiBinary):
        assert np.array_equal(one.n, other.n)
    elif isinstance(one, spaces.MultiDiscrete):
        assert one.nvec.dtype == other.nvec.dtype
        assert np.array_equal(one.nvec, other.nvec)
        assert np.array_equal(one.start, other.start)
    elif isinstance(one, spaces.Text):
        assert one.character_list == other.character_list
        assert (one.min_length, one.max_length) == (other.min_length, other.max_length)
    elif isinstance(one, spaces.Dict):
        assert list(one.spaces) == list(other.spaces)
        assert [type(key) for key in one.spaces] == [type(key) for key in other.spaces]
        for key in one.spaces:
            exact(one[key], other[key])
    elif isinstance(one, (spaces.Tuple, spaces.OneOf)):
        for left, right in zip(one.spaces, other.spaces, strict=True):
            exact(left, right)
    elif isinstance(one, spaces.Sequence):
        assert one.stack == other.stack
        exact(one.feature_space, other.feature_space)
    elif isinstance(one, spaces.Graph):
        exact(one.node_space, other.node_space)
        assert (one.edge_space is None) == (other.edge_space is None)
        if one.edge_space is not None:
            exact(one.edge_space, other.edge_space)
    return True


def test_the_exact_comparison_sees_what_gymnasium_does_not():
    one = spaces.Box(-1, 1, (2,), np.int32)
    for change in ("low", "bounded_below"):
        other = spaces.Box(-1, 1, (2,), np.int32)
        getattr(other, change)[0] ^= True
        with pytest.raises(AssertionError):
            exact(one, other)
    with pytest.raises(AssertionError):
        exact(spaces.Box(0, np.float32(1e-9), (1,)), spaces.Box(0, np.float32(2e-9), (1,)))


@every_space
def test_every_space_comes_back_exactly(name):
    space = EVERY_SPACE[name]()
    assert exact(space, there_and_back(space))
    assert exact(space, published_space(space))


@pytest.mark.parametrize("name", sampled(EVERY_SPACE, 4))
def test_the_same_seed_gives_the_same_samples_afterwards(name):
    space = EVERY_SPACE[name]()
    other = there_and_back(space)
    space.seed(7)
    other.seed(7)
    for _ in range(20):
        one, another = space.sample(), other.sample()
        assert digest(one) == digest(another)
        assert repr(one) == repr(another)


def test_bounds_that_are_close_but_not_equal_come_back_to_the_bit():
    low = np.array([0.1, np.nextafter(0.1, 1), 5e-324, -np.inf, -0.1])
    high = np.array([0.1, 1 / 3, 1e-323, np.inf, np.nextafter(-0.1, 1)])
    for dtype in (np.float64, np.float32, np.float16):
        with np.errstate(all="ignore"):
            box = spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
        assert exact(box, there_and_back(box))


@few
@given(
    st.sampled_from([np.float16, np.float32, np.float64]).flatmap(
        lambda dtype: hnp.arrays(
            dtype,
            st.tuples(st.just(2), st.integers(0, 4)),
            elements=hnp.from_dtype(np.dtype(dtype), allow_nan=False, allow_infinity=False),
        )
    )
)
def test_any_bounds_of_floats_come_back_to_the_bit(pair):
    low, high = pair.min(axis=0), pair.max(axis=0)
    box = spaces.Box(low, high, low.shape, low.dtype.type)
    assert exact(box, there_and_back(box))


def test_the_bounded_flags_come_back_where_the_bounds_alone_do_not_tell():
    limits = np.iinfo(np.int32)
    bounded = spaces.Box(limits.min, limits.max, (3,), np.int32)
    unbounded = spaces.Box(-np.inf, np.inf, (3,), np.int32)
    assert bounded == unbounded
    assert there_and_back(bounded).is_bounded()
    assert not there_and_back(unbounded).is_bounded("below")
    assert not there_and_back(unbounded).is_bounded("above")


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (4, 84, 84), np.uint8),
        spaces.Box(-np.inf, np.inf, (1000, 1000), np.float64),
        spaces.MultiDiscrete(np.full(10000, 7)),
        spaces.MultiBinary((100, 100)),
    ],
    ids=repr,
)
def test_a_big_uniform_space_is_short(space):
    assert len(space_to_json(space)) < 200
    assert exact(space, there_and_back(space))


def test_dict_keys_come_back_with_their_types_and_order():
    keys = ["b", "a", 3, -1, 2.5, float("inf"), None, ("x", 1, (None,)), "", np.int64(9)]
    space = ordered_dict((key, spaces.Discrete(index + 1)) for index, key in enumerate(keys))
    back = there_and_back(space)
    assert list(back.spaces) == keys
    assert [type(key) for key in back.spaces] == [*map(type, keys[:-1]), int]
    assert isinstance(there_and_back(spaces.Dict([(True, spaces.Discrete(1))])), spaces.Dict)
    assert next(iter(there_and_back(spaces.Dict([(True, spaces.Discrete(1))])).spaces)) is True


def test_a_tuple_stays_apart_from_a_dict_and_a_one_of():
    parts = [spaces.Discrete(2), spaces.Discrete(3)]
    for space in (spaces.Tuple(parts), spaces.OneOf(parts), spaces.Dict([("0", parts[0]), ("1", parts[1])])):
        assert exact(space, there_and_back(space))


def test_a_subclass_counts_as_the_space_that_it_extends():
    class Mine(spaces.Discrete):
        pass

    assert type(there_and_back(Mine(3))) is spaces.Discrete


class Mission(spaces.Space):
    """As MiniGrid's MissionSpace: strings that a function makes."""

    def __init__(self, function, words):
        self.function, self.words = function, words
        super().__init__((), str)

    def sample(self, mask=None, probability=None):
        return self.function(self.words[self.np_random.integers(len(self.words))])

    def contains(self, x):
        return x in [self.function(word) for word in self.words]

    def __eq__(self, other):
        return isinstance(other, Mission) and self.words == other.words


def go_to(word):
    return f"go to the {word} ball"


NAME = f"{__name__}:Mission"


@pytest.fixture
def readers(monkeypatch):
    """The table of readers, empty."""
    return without_readers(monkeypatch)


def test_a_custom_space_of_text_is_a_text_for_a_client_without_a_reader_with_a_warning():
    text = space_to_json(spaces.Dict(mission=Mission(go_to, ["red"])))
    with pytest.warns(RuntimeWarning, match=r"the remote space '.*:Mission' is a Text of printable .*register_space"):
        space = space_from_json(text)
    assert type(space["mission"]) is spaces.Text
    assert space["mission"].contains("go to the red ball\n")
    assert published_space(spaces.Dict(mission=Mission(go_to, ["red"]))) == space


def test_attributes_of_a_custom_space_may_look_like_spaces():
    space = Mission(go_to, ["red"])
    space.config = [{"type": "Box"}, {"type": "MultiBinary", "n": 1 << 40}]
    assert type(published_space(space)) is spaces.Text


def test_a_registered_reader_makes_the_exact_space_of_what_is_told(readers):
    told = []

    def read(attributes, plain):
        told.append((attributes, plain))
        assert attributes["function"] == {"name": f"{__name__}:go_to"}
        return Mission(go_to, attributes["words"])

    register_space(NAME, read)
    mine = spaces.Dict(mission=Mission(go_to, ["red", "blue"]), n=spaces.Discrete(2))
    space = space_from_json(space_to_json(mine))
    assert space == mine
    assert told == [
        (
            {"function": {"name": f"{__name__}:go_to"}, "words": ["red", "blue"]},
            spaces.Text(4096, min_length=0, charset=string.printable),
        )
    ]
    sample = space.sample()
    assert layout_of(space).unpack(layout_of(published_space(mine)).pack(sample)) == sample


def test_a_subclass_of_a_space_of_gymnasium_can_be_registered_too(readers):
    class Even(spaces.Discrete):
        def __init__(self, n, step):
            super().__init__(n)
            self.step = step

    register_space(f"{__name__}:{Even.__qualname__}", lambda attributes, plain: Even(plain.n, attributes["step"]))
    space = space_from_json(space_to_json(spaces.Sequence(Even(4, 2)))).feature_space
    assert type(space) is Even
    assert (space.n, space.step) == (4, 2)
    assert type(published_space(Even(4, 2))) is spaces.Discrete


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda attributes, plain: 5, "returned 5, where a gymnasium.Space was expected"),
        (lambda attributes, plain: spaces.Discrete(2), "returned Discrete.*, whose samples differ from those of Text"),
        (lambda attributes, plain: attributes["missing"], "raised KeyError"),
    ],
)
def test_a_reader_that_fails_is_named(read, message, readers):
    register_space(NAME, read)
    with pytest.raises(SettingError, match=f"the reader registered for the space {NAME} {message}"):
        space_from_json(space_to_json(Mission(go_to, ["red"])))


@pytest.mark.parametrize(("name", "read"), [("Mission", len), (5, len), (NAME, "a function")])
def test_only_a_function_can_be_registered_by_the_name_of_a_class(name, read, readers):
    with pytest.raises(SettingError, match="expected"):
        register_space(name, read)
    assert not readers


def test_nothing_that_a_server_names_is_imported_or_called(readers):
    data = {
        "type": "Text",
        "min_length": 0,
        "max_length": 5,
        "charset": "ab",
        "class": "os:system",
        "attributes": {"x": 1},
    }
    with pytest.warns(RuntimeWarning, match="the remote space 'os:system' is a Text"):
        assert space_from_json(json.dumps(data)) == spaces.Text(5, min_length=0, charset="ab")


def test_a_space_without_a_form_is_refused_with_its_place():
    space = spaces.Dict(a=spaces.Tuple((spaces.Discrete(2), spaces.Dict(b=spaces.Space()))))
    with pytest.raises(UnsupportedSpaceError, match=r"own kinds at \['a'\]\[1\]\['b'\], got"):
        space_to_json(space)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Space((2,), np.float32),
        spaces.Space(),
        spaces.Dict([(object, spaces.Discrete(2))]),
        spaces.Tuple([spaces.Space()]),
        spaces.Box(-1, 1, (2,), np.longdouble),
        "a space",
    ],
    ids=stable_id,
)
def test_what_has_no_form_is_refused(space):
    with pytest.raises(UnsupportedSpaceError, match="expected"):
        space_to_json(space)


def test_the_refusal_of_a_custom_space_names_the_remedy():
    with pytest.raises(UnsupportedSpaceError, match=r"of type Space; wrap the environment .*TransformObservation"):
        space_to_json(spaces.Space())


BOX = {
    "type": "Box",
    "shape": [2],
    "dtype": "float32",
    "low": 0,
    "high": 1,
    "bounded_below": True,
    "bounded_above": True,
}


@pytest.mark.parametrize(
    "data",
    [
        None,
        5,
        [],
        "Box",
        {},
        {"type": None},
        {"type": "Cube"},
        {"type": "Box"},
        {**BOX, "low": 2},
        {**BOX, "low": [0]},
        {**BOX, "low": [0, "x"]},
        {**BOX, "low": None},
        {**BOX, "low": 1e99},
        {**BOX, "dtype": "int8", "high": "inf"},
        {**BOX, "dtype": "int8", "high": 300},
        {**BOX, "dtype": "int8", "high": [1, 1.5]},
        {**BOX, "dtype": "banana"},
        {**BOX, "dtype": 5},
        {**BOX, "dtype": "object"},
        {**BOX, "dtype": "U3"},
        {**BOX, "shape": [-1]},
        {**BOX, "shape": [2.5]},
        {**BOX, "shape": 2},
        {**BOX, "shape": [10**13]},
        {**BOX, "shape": [1] * 100},
        {"type": "Discrete", "n": 0, "start": 0, "dtype": "int64"},
        {"type": "Discrete", "n": -1, "start": 0, "dtype": "int64"},
        {"type": "Discrete", "n": "3", "start": 0, "dtype": "int64"},
        {"type": "Discrete", "n": 2**70, "start": 0, "dtype": "int64"},
        {"type": "Discrete", "n": 3, "start": 0, "dtype": "float32"},
        {"type": "MultiBinary", "n": -1},
        {"type": "MultiBinary", "n": [10**13]},
        {"type": "MultiBinary", "n": "x"},
        {"type": "MultiDiscrete", "shape": [2], "dtype": "int64", "nvec": [1, 0], "start": 0},
        {"type": "MultiDiscrete", "shape": [10**13], "dtype": "int64", "nvec": 1, "start": 0},
        {"type": "Text", "min_length": 3, "max_length": 2, "charset": "ab"},
        {"type": "Text", "min_length": 0, "max_length": 2, "charset": 5},
        {"type": "Dict", "sort_keys": True, "spaces": [["a"]]},
        {"type": "Dict", "sort_keys": True, "spaces": [[{}, {"type": "Text"}]]},
        {"type": "Tuple", "spaces": [5]},
        {"type": "OneOf", "spaces": []},
        {"type": "Sequence", "feature": None, "stack": False},
        {"type": "Graph", "node": {"type": "Text"}, "edge": None},
    ],
    ids=lambda data: json.dumps(data)[:60],
)
def test_malformed_json_is_a_tensor_error_that_shows_it(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TensorError, match="expected a space as JSON, got"):
            space_from_json(json.dumps(data))


@pytest.mark.parametrize("kind", [{"type": "MultiBinary", "n": [1] * 65}, {"type": "Box", "shape": [1] * 65}])
def test_a_shape_without_end_is_refused_before_its_product_is_found(kind):
    with pytest.raises(TensorError, match="expected at most 64 dimensions, got 65"):
        space_from_json(json.dumps({**kind, "dtype": "int8"}))


@pytest.mark.parametrize("text", ["", "{", "NaN", "[" * 100000, '{"type": "Tuple", "spaces": [' * 500])
def test_text_that_is_no_json_is_a_tensor_error(text):
    with pytest.raises(TensorError, match="expected a space as JSON, got") as caught:
        space_from_json(text)
    assert len(str(caught.value)) < 1000


def test_a_space_nested_too_deep_is_refused():
    data = {"type": "Discrete", "n": 2, "start": 0, "dtype": "int64"}
    for _ in range(80):
        data = {"type": "Tuple", "spaces": [data]}
    with pytest.raises(TensorError, match="nested more than 64 levels"):
        space_from_json(json.dumps(data))


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "Box", "shape": [10**9], "dtype": "float32", "low": 0, "high": 1},
        {"type": "MultiBinary", "n": 10**9},
        {"type": "MultiDiscrete", "shape": [10**9], "dtype": "int64", "nvec": 2, "start": 0},
        {"type": "Tuple", "spaces": [{"type": "MultiBinary", "n": 10**8}] * 10},
        {"type": "Box", "shape": [1], "dtype": "V1000000000", "low": 0, "high": 1},
    ],
    ids=["box", "binary", "discrete", "many", "dtype"],
)
def test_an_exact_space_is_refused_before_memory_is_taken(kind):
    with pytest.raises(TensorError, match="at most 512 MiB"):
        space_from_json(json.dumps(kind))


@pytest.mark.slow
def test_spaces_as_large_as_environments_have_are_none_of_these():
    camera = spaces.Box(0, 255, (4096, 4096, 3), np.uint8)
    assert space_from_json(space_to_json(camera)) == camera
