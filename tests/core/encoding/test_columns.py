"""`bridge.core.encoding.columns`: long lists of what is alike come back as they were, and cost what their bytes say."""

import contextlib
import enum

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.core.encoding import values
from bridge.errors import RefusedError, SettingError, TensorError
from bridge.pb import bridge_pb2 as pb
from tests.core.encoding.trees import objects, same, trees
from tests.parallel_envs import Relay
from tests.support import assert_identical, sampled

few = settings(max_examples=80, deadline=None)


class Level(enum.IntEnum):
    LOW = 1


def infos(count):
    """The infos of a batch: some episodes end in it, and have further ones."""
    batch = []
    for index in range(count):
        info = {
            "x": index / 7,
            "steps": index,
            "ok": index % 3 == 0,
            "name": f"n{index}",
            "none": None,
            "é": (index, 2.5),
        }
        if index % 50 == 49:
            info |= {"terminal": {"goal": np.arange(3.0) * index}, "episode": {"r": 1.5, "l": index}}
        batch.append(info)
    return batch


def read_by_columns(value):
    data = values.encode(value, columns=True)
    return values.decode_request(data), data


COUNT = 40
LISTS = {
    "floats": [0.1 * number for number in range(COUNT)] + [-0.0, float("nan"), float("inf")],
    "ints": list(range(-3, COUNT)),
    "large ints": [2**62 - number for number in range(COUNT)],
    "huge ints": [2**70 + number for number in range(COUNT)],
    "truth values": [number % 2 == 0 for number in range(COUNT)],
    "truth values and ints": [True, 1] * COUNT,
    "ints and floats": [1, 1.0] * COUNT,
    "strings": ["", "a", "καλημέρα\0🎲"] * COUNT,
    "nones": [None] * COUNT,
    "bytes": [b"a"] * COUNT,
    "arrays": [np.full((2, 3), number, np.float32) for number in range(COUNT)],
    "big-endian arrays": [np.arange(3, dtype=">i2")] * COUNT,
    "arrays of no dimension": [np.array(number) for number in range(COUNT)],
    "arrays without elements": [np.zeros((0, 3))] * COUNT,
    "arrays of several shapes": [np.zeros(2), np.zeros(3)] * COUNT,
    "arrays of texts": [np.array(["a", "bc"])] * COUNT,
    "object arrays": [objects(1, None)] * COUNT,
    "scalars": [np.float32(number) for number in range(COUNT)],
    "scalars of dates": [np.datetime64("2020-01-01", "D")] * COUNT,
    "scalars of texts": [np.str_("a"), np.str_("bcd")] * COUNT,
    "scalars of several types": [np.float32(1), np.float64(1)] * COUNT,
    "complex": [1 + 2j] * COUNT,
    "pairs": [(number, float(number)) for number in range(COUNT)],
    "lists of several lengths": [[number] * (number % 3) for number in range(COUNT)],
    "tables": [[number, str(number)] for number in range(COUNT)],
    "empty dicts": [{}] * COUNT,
    "dicts with other keys each": [{str(number): number} for number in range(COUNT)],
    "dicts in another order": [{"a": 1, "b": 2}, {"b": 2, "a": 1}] * COUNT,
    "dicts of numbers": [{number: 1, "a": 2} for number in range(COUNT)],
    "sets": [{1, 2}] * COUNT,
    "infos": infos(200),
    "nested": [{"a": infos(20), "b": [[1.5] * 30]} for _ in range(COUNT)],
}


@pytest.mark.parametrize("make", [list, tuple, lambda items: objects(*items), lambda items: {"in": [items]}])
@pytest.mark.parametrize("name", LISTS)
def test_a_list_comes_back_as_it_was_and_as_it_does_one_by_one(name, make):
    value = make(LISTS[name])
    read, _ = read_by_columns(value)
    assert same(read, values.decode(values.encode(value)))
    native = [each.astype(each.dtype.newbyteorder("=")) for each in LISTS[name]] if "endian" in name else LISTS[name]
    assert same(read, make(native))


@few
@given(st.lists(trees, max_size=3), st.integers(15, 40), st.randoms(use_true_random=False))
def test_any_list_of_any_values_comes_back_as_it_was(items, count, random):
    value = [random.choice(items) for _ in range(count)] if items else []
    assert same(read_by_columns(value)[0], value)


@pytest.mark.slow
def test_columns_cost_a_fraction_of_single_values():
    batch = infos(4096)
    read, data = read_by_columns(batch)
    assert same(read, batch)
    message = pb.Value.FromString(data)
    assert len(data) < len(values.encode(batch)) / 2
    assert message.column.objects == 4096
    # 30 infos of 8192 transitions are more than 200,000 values, which one by one would be too many.
    batch = [{f"metric {key}": key / 7 for key in range(30)} for _ in range(8192)]
    assert same(read_by_columns(batch)[0], batch)
    with pytest.raises(TensorError, match="at most 100000 values"):
        values.decode_request(values.encode(batch))


def test_what_belongs_to_one_row_is_not_shared_with_another():
    read, _ = read_by_columns([{"a": np.zeros(2), "b": [1]} for _ in range(COUNT)])
    read[0]["a"][:] = 7
    read[0]["b"].append(2)
    assert read[1]["a"].tolist() == [0, 0]
    assert read[1]["b"] == [1]
    assert read[0]["a"].base is None


def test_subclasses_come_back_as_they_do_one_by_one():
    for value in ([Level.LOW] * COUNT, [np.float64(1)] * COUNT, [{"a": Level.LOW}] * COUNT):
        assert same(read_by_columns(value)[0], values.decode(values.encode(value)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"a": 1}] * 30 + [{"a": object()}], r"value\[30\]\['a'\] is of type object"),
        ([1.5] * 30 + [range(3)], r"value\[30\] is of type range"),
        (["a"] * 30 + ["\ud800"], r"value\[30\] is text that UTF-8 cannot encode"),
        ([{"\ud800": 1}] * 30, r"the key of value\[0\]\['\\ud800'\] is text"),
        ([(1, [np.ma.array([1], mask=[1])])] * 30, r"value\[0\]\[1\]\[0\] is a masked array"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_place(value, message):
    with pytest.raises(TensorError, match=message):
        values.encode(value, columns=True)


def test_what_contains_itself_is_refused_at_once():
    for inner in ([], {}):
        cycle = [inner] * 30
        inner.append(cycle) if isinstance(inner, list) else inner.update(a=cycle, b=cycle)
        with pytest.raises(TensorError, match="nested more than 32"):
            values.encode(cycle, columns=True)


def test_the_deepest_nesting_comes_back():
    value = [(1.0, 2)] * COUNT
    for _ in range(14):
        value = [(part,) for part in [value] + [[]] * COUNT]
    assert same(read_by_columns(value)[0], value)
    with pytest.raises(TensorError, match="nested more than 32"):
        values.encode([[[[value]]]], columns=True)


# What comes from the network


def column(**fields):
    return pb.Value(column=pb.Value.Column(**fields))


def numbers(array):
    return values.to_value(np.asarray(array)).array


def table(*forms, form_of):
    return pb.Value.Table(forms=forms, form_of=form_of)


FORM = pb.Value.Form
ONE_NONE = pb.Value.Column(count=1, nones=b"a")
TWO = values.to_value([1, 2])


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (column(count=3), "got none"),
        (column(count=2, numbers=numbers([1, 2, 3])), "came with 3 items, and says that there are 2"),
        (column(numbers=numbers([1, 2, 3])), "came with 3 items, and says that there are 0"),
        (column(count=2, numbers=numbers(["a", "b"])), "a column of numbers"),
        (column(count=1, numbers=numbers([[1, 2]])), "a column of numbers"),
        (column(count=1, numbers=numbers(5)), "came with -1 items"),
        (column(count=10**9, numbers=pb.Value.Array(dtype="<f8", shape=[10**9, 0])), "came with 0 bytes"),
        (column(objects=10**9, arrays=pb.Value.Array(dtype="<f8", shape=[10**9, 0])), "came with 0 bytes"),
        (column(objects=2, arrays=values.to_value(objects(1, 2)).array), "a column of arrays"),
        (column(count=1, arrays=pb.Value.Array(dtype="<i1", shape=[1, 1], data=b"a", is_scalar=True)), "of arrays"),
        (column(count=2, rows=table(FORM(), form_of=b"\0\0")), "came with 2 items, and says that there are 0"),
        (column(count=2, arrays=numbers([1, 2])), "came with 2 items, and says that there are 0"),
        (column(objects=2, numbers=numbers([1, 2])), "came with 2 items, and says that there are 0"),
        (column(count=10**9, nones=b"a"), "came with 1 items"),
        (column(count=1, texts=pb.Value.Texts(joined="abc", lengths=numbers([2]))), "lengths of another sum"),
        (column(count=2, texts=pb.Value.Texts(joined="abc", lengths=numbers([-1, 4]))), "lengths of 3 characters"),
        (column(count=1, texts=pb.Value.Texts(joined="abc", lengths=numbers([3.0]))), "lengths of 3 characters"),
        (column(count=2, texts=pb.Value.Texts(lengths=numbers([2**62, 2**62]))), "lengths of 0 characters"),
        (column(objects=2, rows=table(form_of=b"\0\0")), "of 0 forms"),
        (column(objects=3, rows=table(FORM(), form_of=b"\0\0")), "came with 2 items"),
        (column(objects=2, rows=table(FORM(), form_of=b"\0\1")), "one of number 1"),
        (column(objects=2, rows=table(FORM(keys=["a"]), form_of=b"\0\0")), "1 keys and 0 columns"),
        (column(objects=2, rows=table(FORM(columns=[TWO]), form_of=b"\0\0")), "0 keys and 1 columns"),
        (column(objects=3, rows=table(FORM(kind=FORM.LIST, columns=[TWO]), form_of=b"\0\0\0")), "columns of 3 items"),
        (column(objects=1, rows=table(FORM(kind=FORM.TUPLE, columns=[pb.Value(text="")]), form_of=b"\0")), "of 1 item"),
        (column(objects=2, rows=table(FORM(kind=7, columns=[TWO]), form_of=b"\0\0")), "0 keys and 1 columns"),
        (pb.Value(array=pb.Value.Array(dtype="object", shape=[2], column=ONE_NONE)), "cannot be read"),
    ],
    ids=str,
)  # fmt: skip
def test_a_message_that_is_no_column_says_why(message, text):
    with pytest.raises(TensorError, match=text):
        values.decode(message.SerializeToString())


@few
@given(st.data())
def test_garbled_columns_are_a_value_or_a_tensor_error_and_nothing_else(data):
    raw = bytearray(values.encode(infos(data.draw(st.integers(16, 60))), columns=True))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TensorError):
        values.decode_request(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


def test_what_a_client_sends_in_columns_is_counted_before_it_is_read():
    """A row, and an array, is an object of its own; four numbers or strings cost as much."""
    assert len(values.decode_request(values.encode([None] * 399_000, columns=True))) == 399_000
    assert len(values.decode_request(values.encode([{}] * 99_000, columns=True))) == 99_000
    nones = column(count=90_000, nones=bytes(90_000))
    for message in (
        column(count=410_000, nones=bytes(410_000)),
        column(objects=110_000, rows=table(FORM(), form_of=bytes(110_000))),
        column(objects=110_000, arrays=numbers(np.zeros(110_000, np.int8))),
        pb.Value(list=pb.Value.List(items=[nones] * 5)),
        pb.Value(array=pb.Value.Array(dtype="object", column=column(count=410_000, nones=bytes(410_000)).column)),
    ):
        with pytest.raises(TensorError, match="at most 100000 values"):
            values.decode_request(message.SerializeToString())


# Over a connection


class Store:
    """Keeps what it is given."""

    kept = None
    options = None

    def keep(self, *args, **kwargs):
        self.kept = [*args, kwargs]
        return self.kept

    def size(self):
        return len(self.kept)


def stored(kind):
    """Return a CartPole, or an environment of agents, that keeps what it is given."""
    if kind is not None:
        return type("Stored", (Store, kind), {})()

    class Stored(Store, gymnasium.Wrapper):
        def reset(self, *, seed=None, options=None):
            self.options = options
            return self.env.reset(seed=seed)

    return Stored(gymnasium.make("CartPole-v1"))


BATCH = [{f"metric {key}": key / 7 for key in range(15)} | {"ok": True, "name": "a"} for _ in range(2048)]


@pytest.mark.parametrize("isolation", [None, pytest.param("process", marks=pytest.mark.slow)])
def test_a_single_environment_takes_the_infos_of_a_batch(isolation):
    with serve_gym(lambda: stored(None), isolation=isolation) as server:
        env = make_remote(server.url)
        assert_identical(env.call("keep", BATCH, infos=objects(*BATCH)), [BATCH, {"infos": objects(*BATCH)}])
        env.set_attr("kept", BATCH * 2)
        assert env.call("size") == 4096
        assert_identical(env.get_attr("kept"), BATCH * 2)
        env.reset(options={"batch": BATCH, "curve": [0.5] * 50_000})
        assert_identical(env.get_attr("options"), {"batch": BATCH, "curve": [0.5] * 50_000})
        env.close()


@pytest.mark.parametrize(
    "keywords", sampled([{"isolation": "process"}, {}, {"thread_safe": True}], 3, slow=True), ids=str
)
def test_lanes_and_worlds_take_the_infos_of_a_batch(keywords):
    with serve_gym(lambda: stored(None), num_envs=2, **keywords) as server:
        envs = make_vec_remote([server.url, f"{server.url}?num_envs=1"])
        assert_identical(envs.call("keep", BATCH), ([BATCH, {}],) * 3)
        envs.set_attr("kept", [BATCH, BATCH * 3, [1.5] * 300_000])
        assert envs.call("size") == (2048, 6144, 300_000)
        envs.close()


def test_agents_take_the_infos_of_a_batch():
    with serve_parallel(lambda: stored(Relay)) as server:
        env = make_parallel_remote(server.url)
        assert_identical(env.call("keep", BATCH), [BATCH, {}])
        env.close()


@pytest.mark.slow
def test_a_server_refuses_more_than_it_soon_reads_in_each_way():
    mixed = [1, "a"] * 60_000
    with serve_gym(lambda: stored(None)) as server:
        env = make_remote(server.url)
        for ask in (
            lambda: env.call("keep", mixed),
            lambda: env.call("keep", by=[1.5] * 500_000),
            lambda: env.set_attr("kept", mixed),
            lambda: env.set_attr("kept", [1.5] * 500_000),
            lambda: env.reset(options={"mixed": mixed}),
        ):
            with pytest.raises(RefusedError, match="at most 100000 values"):
                ask()
        # The connection goes on.
        assert env.call("keep", 1) == [1, {}]
        env.call("keep", np.zeros(1_000_000))
        env.close()
        with pytest.raises((RefusedError, SettingError), match="at most 100000 values"):
            make_remote(server.url, env_kwargs={"mixed": mixed})
