"""How the state of an environment would be saved, as a property tells it: by a look, without the check of its kind."""

from __future__ import annotations

from typing import Any

from bridge.core.worlds.kinds import local_parts
from bridge.states.graph import CannotCopyError, layers_of, take
from bridge.states.scan import code_in, shared_by

__all__ = ["NONE", "way_of", "way_of_agent"]

NONE = "none: "
"""What the text begins with where there is no state, before the reason."""


def way_of(env: Any) -> str:
    """Return `SavedState.how` of a state of an environment, or of lanes; or why it would have none.

    It looks at what the environment holds now. Whether a copy goes on alike is found by the check of its kind, which a
    first save has done.
    """
    parts = local_parts(env)
    if not parts:
        return f"{NONE}its lanes are in other processes, or in a simulator"
    try:
        snapshot, _ = take(parts[0])
    except CannotCopyError:
        reason = shared_by(code_in(layers_of(parts[0]))).reason
        return f"{NONE}{reason}" if reason else "replay"
    except Exception as error:  # whatever a library raises before a first reset
        return f"{NONE}it cannot be looked at before its first reset: {error}"
    return "+".join(snapshot.how)


def way_of_agent(name: str, space: Any) -> str:
    """Return why the environment of several agents has no state."""
    return f"{NONE}it has several agents"
