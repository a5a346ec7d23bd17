"""Policies that play agents of a server's worlds without a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from bridge.core.extras import feature
from bridge.core.keywords import by_name
from bridge.core.worlds.group import allowed_choices, name_of_function
from bridge.core.worlds.stand_ins import Policy, StandIn
from bridge.errors import SettingError

__all__ = ["RANDOM", "GivenPolicies", "as_policy", "policy_name"]

_TIMEOUT = 2.0

RANDOM = "random"
"""The name of a policy that takes random allowed actions."""


class GivenPolicies:
    """The policies given by a keyword; implements `bridge.core.worlds.stand_ins.StandIns`.

    Args:
        what: The name of the keyword, for messages.
        given: A policy, the URL of a policy, or `"random"` for all agents; or a mapping of these by agent.

    Raises:
        SettingError: `given` is something else.
    """

    def __init__(self, what: str, given: object) -> None:
        self._what = what
        self._given = given
        for policy in given.values() if isinstance(given, Mapping) else [given]:
            _check(what, policy)

    def check(self, agents: Sequence[str]) -> None:
        """Raise SettingError if a policy is for an agent that does not exist."""
        by_name(self._what, self._given, agents, "agents")

    def find(self, spaces: Mapping[str, spaces.Space[Any]]) -> Mapping[str, StandIn]:
        """Return the policies of a world by agent; raises like `as_policy`."""
        given = by_name(self._what, self._given, list(spaces), "agents")
        return {
            name: StandIn(policy_name(policy), as_policy(self._what, policy, spaces[name]))
            for name, policy in given.items()
        }


def as_policy(what: str, given: object, space: spaces.Space[Any]) -> Policy:
    """Return the given policy, the policy at a URL, or a random policy for `"random"`.

    Args:
        what: The name of the keyword, for messages.
        given: A policy, the URL of a policy, or `"random"`.
        space: The action space.

    Raises:
        SettingError: `given` is something else, or the CA certificate that the URL names cannot be read.
        AddressError: The URL cannot be read.
    """
    _check(what, given)
    if isinstance(given, str) and given != RANDOM:
        with feature("policies", "the URL of a policy"):
            from bridge.policies.remote_policy import RemotePolicy

        # The policy is not told where episodes begin, so it must not keep the rest of an action chunk. A world with
        # other agents does not wait for a policy server to come back. Each frame waits for the answer, so the timeout
        # is short unless the URL sets another.
        return RemotePolicy(given, execution_horizon=1, timeout=_TIMEOUT, reconnect=0.0)
    return given if callable(given) else partial(_random_action, space)


def _check(what: str, policy: object) -> None:
    named = isinstance(policy, str) and (policy == RANDOM or policy.startswith(("ws://", "wss://")))
    if not (callable(policy) or named):
        text = f'expected {what} as policies (observation to action), their ws:// URLs or "random", got {policy!r:.80}'
        raise SettingError(text)


def _random_action(space: spaces.Space[Any], observation: object) -> object:
    allowed = allowed_choices(observation, space)
    return space.sample() if allowed is None else space.sample(mask=np.asarray(allowed, np.int8))


def policy_name(given: object) -> str:
    """Return the name of a policy, for people."""
    if isinstance(given, str):
        return RANDOM if given == RANDOM else "policy"
    return name_of_function(given)
