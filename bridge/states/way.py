"""How the state of an environment would be saved, for a property: a quick look, without the check of its kind."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from bridge.core.worlds.kinds import local_parts
from bridge.states.graph import take
from bridge.states.layers import layers_of
from bridge.states.refusal import CannotCopyError
from bridge.states.scan import code_in, shared_by

__all__ = ["NONE", "way_of"]

NONE = "none: "
"""The prefix of the text if there is no state; the reason follows."""


def way_of(env: Any) -> str:
    """Return the `SavedState.how` of an environment or of lanes, or why they would have no state.

    This inspects only what the environment holds now. The check at the first save shows whether a copy goes on in the
    same way.
    """
    together = isinstance(env, VectorEnv) and not isinstance(env, SyncVectorEnv)
    if together and isinstance(env.unwrapped, AsyncVectorEnv):
        return f"{NONE}its lanes are in other processes"
    one = env if together else local_parts(env)[0]
    try:
        snapshot, _ = take(one)
    except CannotCopyError as error:
        reason = str(error) if together else shared_by(code_in(layers_of(one))).reason
        return f"{NONE}{reason}" if reason else "replay"
    except Exception as error:  # libraries may raise anything before the first reset
        return f"{NONE}it cannot be looked at before its first reset: {error}"
    return "+".join(snapshot.how)
