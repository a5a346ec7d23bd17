"""The state of NumPy's random generators, as something that the values codec carries exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.errors import TensorError

__all__ = ["generator_of", "state_of"]

# By name, so that nothing but these is ever made of what came from the network.
_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


def state_of(generator: np.random.Generator, seed: int | None) -> dict[str, Any]:
    """Return a generator's state, and the seed that it was made of.

    Raises:
        TensorError: It is another kind of generator.
    """
    bits: Any = getattr(generator, "bit_generator", None)
    if type(bits).__name__ not in _BIT_GENERATORS:
        raise TensorError(
            f"expected a numpy.random.Generator over one of {', '.join(_BIT_GENERATORS)}, got {generator!r:.80}"
        )
    return {"seed": seed, "state": dict(bits.state)}


def generator_of(facts: Mapping[str, Any]) -> np.random.Generator:
    """Return a generator that goes on exactly where the one of `state_of` was.

    Raises:
        TensorError: The state cannot be read.
    """
    try:
        state = facts["state"]
        bits = _BIT_GENERATORS[state["bit_generator"]](0)
        bits.state = state
        read: Any = bits.state
        # NumPy takes any position in the words that were drawn already, and would read the memory there.
        if not (0 <= read["state"].get("pos", 0) <= 624 and 0 <= read.get("buffer_pos", 0) <= 4):
            raise ValueError("its position is outside of its words")
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise TensorError(f"expected the state of a bit generator, got {facts!r:.80}: {error}") from error
    return np.random.Generator(bits)
