"""Exact states of the Arcade Learning Environment.

`cloneState(include_rng=True)` contains the emulator and the generator of sticky actions, but not the previous action,
which a sticky frame repeats. That matters if the generator's next draw says to repeat: by default in a quarter of all
states. We read from the state whether the next frame repeats. We find the repeated action by trying each action.
"""

from __future__ import annotations

import functools
import re
import struct
from typing import Any

import numpy as np

__all__ = ["AtariState"]

_GENERATOR = re.compile(rb"(?:\d+ ){624}\d+")
"""A `std::mt19937` as text: its words, and its position in them."""
_HEADER = 24
"""The offset of the length of the emulator's section, a little-endian int32. Each text in the state has one too."""
_MOST_REPEATS = 200


class AtariState:
    """A state of an emulator. Taking it leaves the emulator unchanged.

    Args:
        ale: An `ALEInterface` in an episode.

    Raises:
        ValueError: The state has an unknown format, so that a copy might be wrong.
    """

    def __init__(self, ale: Any) -> None:
        self._whole, self._bare = ale.cloneState(include_rng=True), ale.cloneState(include_rng=False)
        data = self._whole.serialize()
        self.size = 3 * len(data)
        """The approximate size in bytes."""
        self._repeated: Any = None
        self._after: Any = None
        repeats = self._repeats(ale.getFloat("repeat_action_probability"))
        if repeats:
            self._find_repeated(ale, repeats)

    def _repeats(self, probability: float) -> int:
        """Return how many of the next frames repeat an action."""
        if probability <= 0.0:
            return 0
        words = np.array(self._generator.group().split(), np.uint64)
        bits = np.random.MT19937()
        state: Any = bits.state
        state["state"] = {"key": words[:624].astype(np.uint32), "pos": int(words[624])}
        bits.state = state
        # Two draws a frame: one for each of the two players.
        draws = np.asarray(bits.random_raw(2 * _MOST_REPEATS), np.float64)[::2] / 2.0**32
        over = np.flatnonzero(draws >= probability)
        if not over.size:
            raise ValueError(f"it repeats actions for more than {_MOST_REPEATS} frames")
        return int(over[0])

    @functools.cached_property
    def _generator(self) -> re.Match[bytes]:
        """The generator of sticky actions, in the bytes of the state."""
        found = list(_GENERATOR.finditer(self._whole.serialize()))
        # Both states contain the console's generator; only this one contains the generator of sticky actions.
        if len(found) != len(_GENERATOR.findall(self._bare.serialize())) + 1:
            raise ValueError("its generator is not where it is expected")
        return found[-1]

    def _find_repeated(self, ale: Any, repeats: int) -> None:
        """Find the action that the next frames repeat, and leave the emulator as it was."""
        for _ in range(repeats):
            ale.act(0)  # the emulator ignores the given action and repeats the previous one
        self._after = ale.cloneState(include_rng=True)
        wanted = ale.cloneState(include_rng=False).serialize()
        for action in ale.getLegalActionSet():
            self._set_action(ale, action)
            for _ in range(repeats - 1):
                ale.act(action)
            if ale.cloneState(include_rng=False).serialize() == wanted:
                self._repeated = action
                break
        else:
            ale.restoreState(self._whole)
            raise ValueError("the action that it repeats is none of those that there are")
        self.put(ale)

    def _set_action(self, ale: Any, action: Any) -> None:
        """Execute an action for one frame and restore the emulator's state, so that this is the previous action."""
        # After the repeated frames, the generator's next draw says to take the given action.
        ale.restoreState(self._after)
        ale.restoreState(self._bare)
        ale.act(action)

    def put(self, ale: Any, seed: int | None = None) -> None:
        """Put the state into an emulator of the same game; a seed reseeds the generator of sticky actions."""
        if self._repeated is not None:
            self._set_action(ale, self._repeated)
        ale.restoreState(self._whole if seed is None else self._seeded(seed))

    def _seeded(self, seed: int) -> Any:
        """Return the state with a reseeded generator."""
        data = self._whole.serialize()
        text = self._generator
        seeded: Any = np.random.MT19937(np.random.SeedSequence([seed, 2])).state["state"]
        made = " ".join(map(str, (*seeded["key"].tolist(), seeded["pos"]))).encode()
        start, more = text.start(), len(made) - len(text.group())
        part = struct.unpack_from("<i", data, _HEADER)[0] + more
        data = b"".join(
            (
                data[:_HEADER],
                struct.pack("<i", part),
                data[_HEADER + 4 : start - 4],
                struct.pack("<i", len(made)),
                made,
                data[text.end() :],
            )
        )
        kind: Any = type(self._whole)
        state = kind.__new__(kind)
        state.__setstate__(data)
        if state.serialize() != data:
            raise ValueError("its generator cannot be seeded")
        return state
