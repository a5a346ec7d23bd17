"""Values of any form, and whether two are the same."""

import math

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


def same(one, other):
    """True if two values are of the same types, dtypes, shapes and bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype == object:
            return all(same(a, b) for a, b in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True))
        return one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, other) and (one == other or one != one != other != other)
    return one == other


def objects(*items, shape=None):
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array if shape is None else array.reshape(shape)


numbers = st.sampled_from([np.dtype(code) for code in "?bhilBHILefdFD"])


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | numbers.flatmap(hnp.from_dtype).map(lambda x: x if isinstance(x, np.generic) else np.asarray(x)[()])
    | hnp.arrays(numbers, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)


trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.none(), st.binary()), inner, max_size=3)
        | st.sets(st.complex_numbers(allow_nan=False) | st.text(max_size=3))
        | st.lists(inner, max_size=3).map(lambda items: objects(*items))
    ),
    max_leaves=8,
)
