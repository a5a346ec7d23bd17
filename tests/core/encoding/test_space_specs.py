"""`bridge.core.encoding.space_specs`: what the specs of another server say of its spaces."""

import numpy as np
import pytest
from gymnasium import spaces

from bridge.core.encoding.space_specs import space_from_specs
from bridge.core.encoding.tensors import Spec
from bridge.errors import TensorError
from tests.support import layout_of, typed_discrete


def test_specs_of_another_server_become_the_space_that_they_describe():
    # D-24
    specs = [
        Spec.number("arm.angle", (2,), np.float64, np.asarray(-3.0), np.asarray(3.0)),
        Spec.number("arm.force", (2,), np.float32, None, np.float32([1, 2])),
        Spec.number("gear", (), np.int32, np.asarray(-1), np.asarray(5)),
        Spec.number("raw", (), np.int64),
        Spec.number("byte", (), np.int8),
        Spec.number("image", (4, 4), np.uint8),
        Spec.number("on", (), np.bool_),
        Spec.text("said", ()),
        Spec.text("words", (-1,)),
        Spec.number("events", (-1, 2), np.int32, np.asarray(0), np.asarray(9)),
    ]
    space = space_from_specs(specs, "observation")
    assert set(space.spaces) == {"arm", "gear", "raw", "byte", "image", "on", "said", "words", "events"}
    assert space["arm"]["angle"] == spaces.Box(-3, 3, (2,), np.float64)
    assert space["arm"]["force"] == spaces.Box(np.float32([-np.inf] * 2), np.float32([1, 2]))
    assert space["gear"] == typed_discrete(7, -1, np.int32)
    assert space["gear"].dtype == np.int32
    assert space["raw"] == spaces.Box(-(2**63), 2**63 - 1, (), np.int64)
    assert space["byte"] == spaces.Box(-128, 127, (), np.int8)  # 256 is more than an int8 Discrete can say
    assert space["image"] == spaces.Box(0, 255, (4, 4), np.uint8)
    assert space["on"] == spaces.Box(0, 1, (), np.bool_)
    assert isinstance(space["said"], spaces.Text)
    assert space["words"] == spaces.Sequence(space["said"])
    assert space["events"] == spaces.Sequence(spaces.Box(0, 9, (2,), np.int32), stack=True)
    layout = layout_of(space, foreign=True)
    assert {s.name: (s.shape, s.dtype) for s in layout.specs} == {s.name: (s.shape, s.dtype) for s in specs}


@pytest.mark.parametrize("names", [["observation"], ["observation.a", "observation.b"], ["x"], ["a.b.c"], ["a..b"]])
def test_a_layout_for_another_server_uses_its_names(names):
    # also where all of them nest below the name that ours have
    specs = [Spec.number(name, (), np.float32) for name in names]
    space = space_from_specs(specs, "observation")
    assert isinstance(space, spaces.Box) == (names == ["observation"])
    assert sorted(spec.name for spec in layout_of(space, foreign=True).specs) == names


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([Spec.text("a", ()), Spec.text("a.b", ())], "'a.b' nests below 'a', which is a tensor itself"),
        ([Spec.text("a.b", ()), Spec.text("a", ())], "'a' is given twice, or is a level of nesting too"),
        ([Spec.text("a", ()), Spec.text("a", ())], "'a' is given twice"),
        ([Spec.number("a", (), np.int32, np.asarray(5), np.asarray(3))], "min 5, max 3.* has no space"),
        ([Spec.number("a", (2,), np.int32, np.asarray(5), np.asarray(3))], "min 5, max 3.* has no space"),
        ([Spec.number("a", (), np.float32, np.asarray(5.0), np.asarray(3.0))], "has no space"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_specs_that_make_no_space_are_an_error_that_names_them(specs, message):
    # D-7, D-24
    with pytest.raises(TensorError, match=message):
        space_from_specs(specs, "observation")


def test_no_specs_make_an_empty_dict():
    assert space_from_specs([], "action") == spaces.Dict({})
