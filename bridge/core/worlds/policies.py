"""Policies that a server is given for agents that no client plays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from gymnasium import spaces

from bridge.core.worlds.default_actions import allowed_choices
from bridge.errors import SettingError

__all__ = ["RANDOM", "Policy", "as_policy", "by_name", "check_policies", "policy_name"]

Policy: TypeAlias = Callable[[object], object]
"""Observation in, action out."""

_TIMEOUT = 2.0

RANDOM = "random"
"""Stands for a policy that takes any action that is allowed."""


def by_name(what: str, given: object, names: Sequence[str], of: str) -> dict[str, object]:
    """Return what is given for each name, or once for all of them, by name.

    Args:
        what: The keyword that it is given by, for the message.
        given: A mapping by name, or one thing for all; None: nothing.
        names: Those that there are.
        of: What these are, for the message.

    Raises:
        SettingError: It is given for a name that does not exist.
    """
    if not isinstance(given, Mapping):
        return {} if given is None else dict.fromkeys(names, given)
    if unknown := set(given) - set(names):
        raise SettingError(f"expected {what} for {of} of {', '.join(names)}, got {sorted(map(str, unknown))}")
    return dict(given)


def as_policy(what: str, given: object, space: spaces.Space[object]) -> Policy:
    """Return the policy that is given, the one that a URL names, or a random one for `"random"`.

    Args:
        what: The keyword that it is given by, for the message.
        given: A policy, the URL of one, or `"random"`.
        space: The action space.

    Raises:
        SettingError: It is none of these.
        AddressError: The URL cannot be read.
        SettingError: The CA's certificate that the URL names cannot be read.
    """
    _check(what, given)
    if isinstance(given, str) and given != RANDOM:
        from bridge.policies.remote_policy import RemotePolicy  # it needs an extra

        # Nobody tells a policy in a seat where episodes begin, so no rest of a chunk may be kept; and a world that
        # other agents play in does not wait for a server to come back. Each frame waits for the answer: the timeout is
        # short, but for what the URL says.
        return RemotePolicy(given, execution_horizon=1, timeout=_TIMEOUT, reconnect=0.0)
    return given if callable(given) else partial(_random_action, space)


def check_policies(what: str, given: object) -> None:
    """Raise SettingError for what is no policy, nor `"random"`, nor a mapping to these, nor None."""
    if given is not None:
        for policy in given.values() if isinstance(given, Mapping) else [given]:
            _check(what, policy)


def _check(what: str, policy: object) -> None:
    named = isinstance(policy, str) and (policy == RANDOM or policy.startswith(("ws://", "wss://")))
    if not (callable(policy) or named):
        text = f'expected {what} as policies (observation to action), their ws:// URLs or "random", got {policy!r:.80}'
        raise SettingError(text)


def _random_action(space: spaces.Space[object], observation: object) -> object:
    allowed = allowed_choices(observation, space)
    return space.sample() if allowed is None else space.sample(mask=np.asarray(allowed, np.int8))


def policy_name(given: object) -> str:
    """Return what to call a policy to a person."""
    if isinstance(given, str):
        return RANDOM if given == RANDOM else "policy"
    named = given.func if isinstance(given, partial) else given
    if not (inspect.isroutine(named) or inspect.isclass(named)):
        named = type(named)
    name = str(getattr(named, "__name__", ""))
    return name if name.isidentifier() else "policy"
