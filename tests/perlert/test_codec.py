import math
from decimal import Decimal

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import InvalidActionError, PacketError, UnsupportedSpaceError
from bridge.perlert.protocol.codec import TextCodec, decimal_text, parse_decimal
from bridge.perlert.protocol.profile import (
    Claim,
    Extra,
    action_text,
    extra_text,
    format_tag,
    offer_text,
    parse_extra,
    parse_offer,
    parse_tag,
    spaces_text,
    split_action,
)

TOKEN = "00ff00ff00ff"
SPACES = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(np.array([-4.8, -np.inf], np.float32), np.array([4.8, np.inf], np.float32)),
    spaces.Box(0, 255, (2, 2), np.uint8),
    spaces.Box(-1, 1, (), np.float64),
    spaces.Box(-10, 10, (2,), np.int16),
    spaces.Discrete(5),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 5, 3]),
    spaces.MultiDiscrete([2, 5], start=[1, -3]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 2]),
    spaces.Dict({"y": spaces.Box(0, 1, ()), "x": spaces.Discrete(4)}),
    spaces.Dict(
        {"arm": spaces.Dict({"b": spaces.Box(-1, 1, (2,)), "a": spaces.MultiBinary(2)}), "z": spaces.Discrete(2)}
    ),
]


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_sample_comes_back_exactly_when_all_decimals_are_sent(space):
    space.seed(1)
    for named in (True, False):
        codec = TextCodec(space, named=named, decimals=None)
        for _ in range(20):
            sample = space.sample()
            back = codec.decode(codec.encode(sample))
            assert same(back, sample)
            assert space.contains(back)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_no_text_is_longer_than_the_bound_that_publishing_relies_on(space):
    space.seed(2)
    for decimals in (0, 2, 6):
        codec = TextCodec(space, decimals=decimals)
        assert max(len(codec.encode(space.sample())) for _ in range(200)) <= codec.max_bytes()


def test_the_longest_values_of_a_float_space_fit_the_bound():
    space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    extremes = [np.array([-1.23456789e300, 5e-324, -2.2250738585072014e-308, 1.7976931348623157e308])]
    codec = TextCodec(space, decimals=6)
    for value in extremes:
        assert len(codec.encode(value)) <= codec.max_bytes()


def test_the_drafts_own_examples_are_what_is_written():
    # P-22: no more decimals than needed.
    box = spaces.Box(-100, 100, (2,))
    assert TextCodec(box, decimals=2).encode(np.array([5, 6.78], np.float32)) == "5,6.78"
    pair = spaces.Dict({"x": spaces.Box(0, 1, ()), "y": spaces.Box(0, 1, ())})
    assert TextCodec(pair, decimals=2).encode({"x": 0.54, "y": 0.95}) == "x:0.54,y:0.95"


def test_floats_are_rounded_to_the_decimals_that_were_asked_for():
    # P-22
    space = spaces.Box(-10, 10, (3,), np.float64)
    value = np.array([1 / 3, -0.0000001, 2.0])
    assert TextCodec(space).encode(value) == "0.333333,0,2"
    assert TextCodec(space, decimals=1).encode(value) == "0.3,0,2"
    assert TextCodec(space, decimals=None).encode(np.array([0.1, -0.0, 1e-7])) == "0.1,0,0.0000001"


def test_infinity_is_sent_as_the_limit_and_nan_is_refused():
    codec = TextCodec(spaces.Box(-np.inf, np.inf, (2,)))
    assert codec.encode(np.array([np.inf, -np.inf], np.float32)) == "99999999,-99999999"
    with pytest.raises(InvalidActionError, match="NaN"):
        codec.encode(np.array([np.nan, 0], np.float32))


def test_the_parts_of_a_dict_may_come_in_any_order_and_each_once():
    codec = TextCodec(spaces.Dict({"x": spaces.Box(0, 1, (2,)), "y": spaces.Discrete(3)}))
    assert same(codec.decode("y:2,x:0.5,1"), codec.decode("x:0.5,1,y:2"))
    for text in ("x:0.5,1,x:2", "0.5,x:1,y:2", "x:0.5,y:2,1", "x:0.5,1,z:2"):
        with pytest.raises(PacketError):
            codec.decode(text)


def test_a_dict_action_holds_no_colon():
    # P-2
    codec = TextCodec(spaces.Dict({"x": spaces.Box(0, 1, (2,)), "y": spaces.Discrete(3)}), named=False)
    assert codec.encode({"x": np.array([0.5, 1], np.float32), "y": 2}) == "0.5,1,2"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nan",
        "inf",
        "-inf",
        "1_0",
        " 1",
        "1 ",
        "0x1",
        "1e999",
        "\u0661",
        "--1",
        ".",
        "1,2",
        "1.5.2",
        "+1",
        "9" * 500,
    ],
)
def test_what_is_no_finite_decimal_is_refused(text):
    with pytest.raises(PacketError):
        parse_decimal(text)
    with pytest.raises(PacketError):
        TextCodec(spaces.Box(-10, 10, (1,)), named=False).decode(text)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_largest_floats_of_an_action_come_back(dtype):
    most = np.finfo(dtype).max
    codec = TextCodec(spaces.Box(-most, most, (2,), dtype), named=False, decimals=None)
    action = np.array([-most, most])
    assert same(codec.decode(codec.encode(action)), action)
    with pytest.raises(PacketError):
        codec.decode("0,1e309")


@pytest.mark.parametrize("text", ["2", "-1", "1.0", "", "a", "1e0", "99999999999999999999"])
def test_an_action_outside_of_a_discrete_space_is_refused(text):
    with pytest.raises(PacketError):
        TextCodec(spaces.Discrete(2), named=False).decode(text)


@pytest.mark.parametrize("text", ["1.1,0", "0", "0,0,0", "1e39,0"])
def test_an_action_outside_of_a_box_is_refused(text):
    with pytest.raises(PacketError):
        TextCodec(spaces.Box(-1, 1, (2,)), named=False).decode(text)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Dict({"a:b": spaces.Discrete(2)}),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Dict({}),
    ],
    ids=str,
)
def test_a_space_without_a_text_form_is_refused_with_the_remedy(space):
    with pytest.raises(UnsupportedSpaceError, match=r"wrapper|parts"):
        TextCodec(space)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_travels_in_an_offer_exactly(space):
    offer = parse_offer(offer_text(TOKEN, fps=30.0, decimals=6, spaces=spaces_text(space, spaces.Discrete(3))))
    back = offer.observation_space
    assert back == space
    assert type(back) is type(space)
    if isinstance(space, spaces.Box):
        assert np.array_equal(back.low, space.low)
        assert np.array_equal(back.high, space.high)
        assert back.dtype == space.dtype
    if isinstance(space, spaces.Dict):
        assert list(back.spaces) == list(space.spaces)


BOX = '{"type":"Box","shape":%s,"dtype":%s,"low":%s,"high":1,"bounded_below":true,"bounded_above":true}'


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "7",
        BOX % ("[100000000]", '"float32"', "0"),
        BOX % ("[2]", '"float32"', "[0]"),
        BOX % ("[2]", '"float32"', '"nan"'),
        (BOX % ("[2]", '"float32"', "0")).replace('0,"high":1', '"inf","high":"inf"'),
        BOX % ("[2]", '"V100000000"', "0"),
        BOX % ("[1,1,1,1,1,1,1,1,1]", '"float32"', "0"),
        '{"type":"Discrete","n":0,"start":0,"dtype":"int64"}',
        '{"type":"Discrete","n":"x","start":0,"dtype":"int64"}',
        '{"type":"Discrete","n":2,"start":0,"dtype":"object"}',
        '{"type":"MultiBinary","n":-1}',
        '{"type":"MultiBinary","n":1000000000}',
        '{"type":"MultiDiscrete","shape":[0],"dtype":"int64","nvec":[],"start":[]}',
        '{"type":"Text","min_length":0,"max_length":1000000,"charset":"a"}',
        '{"type":"Dict","sort_keys":true,"spaces":[]}',
        '{"type":"Dict","sort_keys":true,"spaces":' * 99 + "[]" + "}" * 99,
    ],
)
def test_a_peers_text_that_is_no_space_is_refused_and_takes_no_memory(text):
    assert parse_offer(f'bridge/1 {{"token":"{TOKEN}","observation":{text}}}') is None


def test_the_profiles_fields_read_back():
    told = spaces_text(spaces.Box(-1, 1, (2,)), spaces.Discrete(3))
    offer = parse_offer(offer_text(TOKEN, seq=7, slot="agent0", fps=30.0, decimals=6, spaces=told))
    assert (offer.token, offer.seq, offer.slot, offer.fps) == (TOKEN, 7, "agent0", 30.0)
    assert (offer.observation_space, offer.action_space) == (spaces.Box(-1, 1, (2,)), spaces.Discrete(3))
    assert parse_offer(offer_text(TOKEN)).fps is None
    assert parse_offer(offer_text(TOKEN, seq=10**9 - 1)).seq == 0, "the next registration would have no form"
    extra = Extra(TOKEN, 3, 4, 5, Decimal("-1.25"), "truncated")
    assert parse_extra(extra_text(extra)) == extra
    for claim in (
        Claim("joe"),
        Claim("joe", True),
        Claim("joe", True, TOKEN, 7, "r"),
        Claim("", True, TOKEN, 7, "l", "ff00ff00ff00"),
    ):
        assert parse_tag(format_tag(claim)) == claim
    assert parse_tag("joe+b1.00ff.1.r") == Claim("joe+b1.00ff.1.r")
    assert len(format_tag(Claim("x" * 23, True, TOKEN, 10**9 - 1, "r", TOKEN)).encode()) <= 64
    assert split_action(action_text(TOKEN, 40000, 7, "1,2")) == (TOKEN, 40000, 7, "1,2")
    assert split_action("1,2") is None


@given(st.text(max_size=200))
def test_no_text_of_a_peer_raises_out_of_the_profile(text):
    parse_extra(text)
    split_action(text)
    parse_tag(text)
    parse_offer(text)
    parse_offer("bridge/1 {" + text)
    parse_offer('bridge/1 {"token":"00ff00ff","observation":' + text + "}")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_decimal_is_written_without_exponent_and_reads_back(value):
    text = decimal_text(Decimal(repr(value)))
    assert "e" not in text.lower()
    assert float(parse_decimal(text)) == value or math.isclose(value, 0)


@given(st.text("0123456789.,-e:xy", max_size=30))
def test_no_text_raises_anything_else_out_of_the_codec(text):
    for space in SPACES:
        for named in (True, False):
            codec = TextCodec(space, named=named)
            try:
                value = codec.decode(text)
            except PacketError:
                continue
            assert space.contains(value)
