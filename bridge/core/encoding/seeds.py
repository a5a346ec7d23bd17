"""Seeds on the wire, and the state of random generators.

A seed is any that Gymnasium takes: a non-negative integer of any size. Seeds below 2**63 travel as int64, which any
client can send; larger ones as decimal text. A world of lanes has one seed per lane, and `NO_SEED` for a lane without
one. The values codec carries the state of NumPy's generators exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridge.core.encoding.names import NO_SEED
from bridge.core.encoding.tensors import Array, pack_tensor
from bridge.core.encoding.values import MAX_DIGITS
from bridge.errors import SeedError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["generator_of", "pack_seed", "state_of", "unpack_seed", "unpack_seeds"]

_INT64 = 1 << 63
_TOO_LARGE = 10**MAX_DIGITS


def pack_seed(seed: int | Sequence[int | None]) -> pb.Tensor:
    """Return the tensor of one seed, or of a seed or None for each lane.

    Raises:
        SeedError: A seed is no integer, or negative.
    """
    # A str is a sequence too.
    if isinstance(seed, str) or not isinstance(seed, Sequence):
        found = _checked(seed)
        return pack_tensor(found if found < _INT64 else str(found))
    numbers = [NO_SEED if item is None else _checked(item) for item in seed]
    if all(number < _INT64 for number in numbers):
        return pack_tensor(np.array(numbers, np.int64))
    # If one seed is too large for int64, all travel as text: a tensor has one type.
    return pack_tensor(np.array([str(number) for number in numbers], object))


def _checked(seed: Any) -> int:
    """Return a seed, or raise the error that Gymnasium raises for it locally."""
    if not isinstance(seed, (int, np.integer)):
        raise SeedError(f"Seed must be a python integer, actual type: {type(seed)}")
    if seed < 0:
        raise SeedError(f"Seed must be greater or equal to zero, actual value: {seed}")
    if seed >= _TOO_LARGE:
        raise SeedError(f"expected a seed of at most {MAX_DIGITS} digits, got one of {int(seed).bit_length()} bits")
    return int(seed)


def unpack_seed(array: Array) -> int:
    """Return the seed of a scalar tensor.

    Raises:
        TensorError: The tensor holds no valid seed.
    """
    found = _integers(array)
    if array.shape != () or found is None or found[0] < 0:
        raise TensorError(f"expected the seed to be a non-negative integer scalar, got {array!r:.80}")
    return found[0]


def unpack_seeds(array: Array, lanes: int) -> int | list[int | None]:
    """Return the single seed, or the seed or None of each lane, of a tensor.

    Raises:
        TensorError: It holds something else.
    """
    found = _integers(array)
    if array.shape not in ((), (lanes,)) or found is None:
        raise TensorError(f"expected an integer seed, or one for each of {lanes} lanes, got {array!r:.80}")
    if array.shape == ():
        if found[0] < 0:
            raise TensorError(f"expected a non-negative seed, got {found[0]}")
        return found[0]
    if min(found) < NO_SEED:
        raise TensorError(f"expected non-negative seeds, or {NO_SEED} for none, got {array!r:.80}")
    return [None if seed == NO_SEED else seed for seed in found]


def _integers(array: Array) -> list[int] | None:
    """Return the elements of an array of integers or of decimal texts; None: it is neither."""
    if array.dtype.kind in "iu":
        return [int(item) for item in array.ravel()]
    if array.dtype.kind != "O":
        return None
    texts = [item if isinstance(item, str) else "" for item in array.ravel()]
    # `isdecimal` alone accepts digits of other scripts. The minus is for NO_SEED.
    if not all(text.removeprefix("-").isdecimal() and text.isascii() and len(text) <= MAX_DIGITS for text in texts):
        return None
    return [int(text) for text in texts]


# By name, so that a name from the network can create only these.
_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


def state_of(generator: np.random.Generator, seed: int | None) -> dict[str, Any]:
    """Return a generator's state, and its seed.

    Raises:
        TensorError: The generator is of another kind.
    """
    bits: Any = getattr(generator, "bit_generator", None)
    if type(bits).__name__ not in _BIT_GENERATORS:
        raise TensorError(
            f"expected a numpy.random.Generator over one of {', '.join(_BIT_GENERATORS)}, got {generator!r:.80}"
        )
    return {"seed": seed, "state": dict(bits.state)}


def generator_of(facts: Mapping[str, Any]) -> np.random.Generator:
    """Return a generator that continues exactly from a state of `state_of`.

    Raises:
        TensorError: The state cannot be read.
    """
    try:
        state = facts["state"]
        bits = _BIT_GENERATORS[state["bit_generator"]](0)
        bits.state = state
        read: Any = bits.state
        # NumPy accepts any position among the words drawn already, and would read memory outside of the array.
        if not (0 <= read["state"].get("pos", 0) <= 624 and 0 <= read.get("buffer_pos", 0) <= 4):
            raise ValueError("its position is outside of its words")
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise TensorError(f"expected the state of a bit generator, got {facts!r:.80}: {error}") from error
    return np.random.Generator(bits)
