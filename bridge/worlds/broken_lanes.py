"""Lanes in processes of their own (AsyncVectorEnv) after one of them has failed."""

from __future__ import annotations

from collections.abc import Mapping

from gymnasium.vector import AsyncVectorEnv

from bridge.errors import Code, RequestError
from bridge.worlds.base import answer_to
from bridge.worlds.kinds import Lanes

__all__ = ["refusal_of_broken_lanes", "without_reset_mask"]


def refusal_of_broken_lanes(env: Lanes, where: str, error: BaseException) -> RequestError | None:
    """Return how to answer calls after a failure that left a vector environment of no use; None: it goes on.

    A lane of an AsyncVectorEnv that raises ends its process, and Gymnasium starts no other one: the whole vector
    environment has to be made anew.

    Args:
        env: The vector environment.
        where: What it did.
        error: What it raised.
    """
    vector = env.unwrapped
    if not isinstance(vector, AsyncVectorEnv) or None not in vector.parent_pipes:
        return None
    first = str(answer_to(where, error)).partition("\n")[0]
    return RequestError(
        Code.FAILED_PRECONDITION, f"the lanes cannot be used since one of them failed, reset all of them: {first}"
    )


def without_reset_mask(options: Mapping[str, object] | None) -> dict[str, object]:
    """Return the options of a reset of lanes that are all new: it cannot leave one of them as it is."""
    return {key: value for key, value in (options or {}).items() if key != "reset_mask"}
