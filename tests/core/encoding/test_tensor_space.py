"""`bridge.core.encoding.tensors`: what a foreign server's tensors of variable shape become."""

import numpy as np
from gymnasium import spaces

from bridge.core.encoding.tensors import Spec, TensorSpace


def test_tensor_spaces_are_equal_where_their_specs_are_and_fit_in_dicts():
    """The space that a foreign server's variable dimensions become."""
    one, same = (TensorSpace(Spec.number("a", (2, -1), np.int32, np.array(0), np.array(5))) for _ in range(2))
    other = TensorSpace(Spec.number("a", (2, -1), np.int32, np.array(0), np.array(6)))
    assert one == same
    assert one != other
    assert "INT32 of shape [2, -1]" in repr(one)
    both = spaces.Dict({"a": one, "b": spaces.Discrete(2)}, seed=1)
    assert both.contains(both.sample())
    assert not one.contains(np.full((2, 3), 6, np.int32))
    assert not one.is_np_flattenable
