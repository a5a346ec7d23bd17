"""`bridge.core.encoding.seeds`: generators of random numbers, as they travel."""

from typing import Any

import numpy as np
import pytest

from bridge.core.encoding import values
from bridge.core.encoding.seeds import generator_of, state_of
from bridge.errors import TensorError


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_every_bit_generator_travels_exactly(kind: str) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(9))
    generator.integers(2**32, dtype=np.uint32)  # leaves half a word behind
    copied = generator_of(values.decode(values.encode(state_of(generator, 9))))
    assert copied.random(100).tolist() == generator.random(100).tolist()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("MT19937", {"state": {"key": np.zeros(624, np.uint32), "pos": 10**6}}),
        ("MT19937", {"state": {"key": np.zeros(624, np.uint32), "pos": 625}}),
        ("MT19937", {"state": {"key": np.zeros(624, np.uint32), "pos": -1}}),
        ("MT19937", {"state": {"key": np.zeros(4, np.uint32), "pos": 0}}),
        ("Philox", {"buffer_pos": -1}),
        ("Philox", {"buffer_pos": 5}),
        ("Philox", {"buffer": []}),
        ("Philox", {"state": {"counter": np.zeros(4, np.uint64), "key": []}}),
        ("PCG64", {"state": {"state": -1, "inc": 1}}),
        ("PCG64DXSM", {"uinteger": -1}),
        ("SFC64", {"has_uint32": 1 << 40}),
        ("SFC64", {"state": np.zeros(4, np.uint64)}),
    ],
)
def test_a_hostile_state_is_refused_before_anything_is_drawn(kind: str, change: dict[str, Any]) -> None:
    state = dict(getattr(np.random, kind)(9).state)
    with pytest.raises(TensorError, match="expected the state of a bit generator"):
        generator_of({"state": state | change})


def test_a_state_whose_words_are_all_drawn_is_taken() -> None:
    state = {"bit_generator": "MT19937", "state": {"key": np.ones(624, np.uint32), "pos": 624}}
    assert generator_of({"state": state}).bit_generator.state["state"]["pos"] == 624
