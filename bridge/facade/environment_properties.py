"""The properties of environments that features add, below `world`."""

from __future__ import annotations

from typing import Any

from bridge.core.extras import has_feature
from bridge.core.worlds.environment import EnvFacts, EnvironmentProperty

__all__ = ["ENVIRONMENT_PROPERTIES"]


def _controls(env: Any) -> str:
    from bridge.web.controls import controls_of

    return controls_of(env)


def _controls_of_agent(facts: EnvFacts, agent: str, space: Any) -> str:
    from bridge.web.controls import controls_of_agent

    return controls_of_agent(facts, agent, space)


def _way(env: Any) -> str:
    from bridge.states.way import way_of

    return way_of(env)


_BY_FEATURE = {
    "web": EnvironmentProperty("controls", "what keys do for a person, as JSON", _controls, _controls_of_agent),
    "states": EnvironmentProperty("states", "how its state would be saved, or none and why, by a look at it", _way),
}
ENVIRONMENT_PROPERTIES = tuple(item for name, item in _BY_FEATURE.items() if has_feature(name))
"""Reading a property imports its feature."""
