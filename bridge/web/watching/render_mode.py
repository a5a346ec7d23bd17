"""The arguments that make an environment render pictures."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

__all__ = ["drawing_kwargs"]

_MODE = "rgb_array"


def drawing_kwargs(env: Any, env_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `env_kwargs` with `render_mode="rgb_array"`, unless a mode is set or the environment does not support it.

    Args:
        env: What `serve_gym` and `serve_parallel` take. For several ids, and for objects, the modes are unknown; the
            page then requests the mode when it creates a world.
        env_kwargs: The arguments of its constructor.
    """
    given = dict(env_kwargs or {})
    if "render_mode" not in given and _draws(env):
        given["render_mode"] = _MODE
    return given


def _draws(env: Any) -> bool:
    creator = env
    if isinstance(env, (str, EnvSpec)):
        try:
            spec = gymnasium.spec(env) if isinstance(env, str) else env
            creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
        except (gymnasium.error.Error, ImportError, AttributeError):  # making the environment raises a better error
            return False
    elif inspect.ismodule(env):
        creator = getattr(env, "parallel_env", None) or getattr(env, "env", None)
    metadata = getattr(creator, "metadata", None)
    # A class of wrappers has a property of this name: only instances know the modes.
    modes = metadata.get("render_modes") if isinstance(metadata, Mapping) else None
    if modes is not None and _MODE not in modes:
        return False
    try:
        # A constructor without `render_mode` would raise TypeError.
        parameters = inspect.signature(creator).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(item.name == "render_mode" or item.kind is item.VAR_KEYWORD for item in parameters)
