"""`bridge.encoding.random_state`: generators of random numbers, as they travel."""

import numpy as np
import pytest

from bridge.encoding import values
from bridge.encoding.random_state import generator_of, state_of


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_every_bit_generator_travels_exactly(kind: str) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(9))
    generator.integers(2**32, dtype=np.uint32)  # leaves half a word behind
    copied = generator_of(values.decode(values.encode(state_of(generator, 9))))
    assert copied.random(100).tolist() == generator.random(100).tolist()
