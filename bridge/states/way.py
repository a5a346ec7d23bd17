"""How the state of an environment would be saved, as a property tells it: by a look, without the check of its kind."""

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
"""What the text begins with where there is no state, before the reason."""


def way_of(env: Any) -> str:
    """Return `SavedState.how` of a state of an environment, or of lanes; or why it would have none.

    It looks at what the environment holds now. Whether a copy goes on alike is found by the check of its kind, which a
    first save has done.
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
    except Exception as error:  # whatever a library raises before a first reset
        return f"{NONE}it cannot be looked at before its first reset: {error}"
    return "+".join(snapshot.how)
