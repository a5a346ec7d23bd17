"""The base class of wrappers that change the timing of calls, but not their data."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import VectorEnv

from bridge.core.client.attributes import OwnAttributes
from bridge.core.client.envs.vector_env import RemoteVectorEnv
from bridge.core.encoding.tensors import Array
from bridge.core.gymnasium_versions import BatchWrapper
from bridge.errors import SettingError

__all__ = ["Transparent"]


class Transparent(OwnAttributes, BatchWrapper):
    """A wrapper that forwards every attribute, so that `BlockingReset` can wrap it like the remote environment itself.

    Args:
        env: The result of `make_vec_remote`, or another wrapper of this kind around it.

    Raises:
        SettingError: `env` is another kind of environment.
    """

    def __init__(self, env: VectorEnv[Any, Any, Array]) -> None:
        if not isinstance(env, (RemoteVectorEnv, Transparent)):
            raise SettingError(
                f"expected what make_vec_remote returns, got {env!r} of type {type(env).__name__}; "
                "BlockingReset goes outside of this wrapper"
            )
        super().__init__(env)

    @property
    def remote(self) -> RemoteVectorEnv:
        """The remote environment inside all wrappers."""
        base = self.env.unwrapped
        if not isinstance(base, RemoteVectorEnv):
            raise SettingError(f"expected a RemoteVectorEnv at the bottom, got {base!r}")
        return base

    def __getattr__(self, name: str) -> Any:
        if name in ("env", "__setstate__"):  # during unpickling there is no `env` yet
            raise AttributeError(name)
        return getattr(self.env, name)
