"""Where a server's PettingZoo environments come from: an id, a callable, a PettingZoo module, or one environment."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import cloudpickle

from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.tensors import unpack_tensor
from bridge.worlds.base import Lock, World, environment_failure, read_bytes, refuse_unknown
from bridge.worlds.isolated import Isolation
from bridge.worlds.isolated_env import start_isolated
from bridge.worlds.multi_agent import MultiAgentWorld, Teamwork

__all__ = ["ParallelSource", "as_parallel"]

_taking = threading.Lock()


def as_parallel(env: Any) -> Any:
    """Return a PettingZoo environment as a parallel one; an AEC one goes through PettingZoo's own conversion.

    Raises:
        SettingError: It is neither.
    """
    if hasattr(env, "agent_iter"):
        from pettingzoo.utils import conversions

        if env.metadata.get("is_parallelizable", False):
            return conversions.aec_to_parallel(env)
        return conversions.turn_based_aec_to_parallel(env)
    missing = [name for name in ("possible_agents", "observation_space", "action_space") if not hasattr(env, name)]
    if missing:
        raise SettingError(
            f"expected a PettingZoo ParallelEnv or AECEnv, got {env!r:.80} of type {type(env).__name__}, which has no "
            f"{', '.join(missing)}"
        )
    return env


def _maker(env_id: str) -> Callable[..., Any]:
    """Find an environment in PettingZoo's own registry, the parallel ones first."""
    import pettingzoo

    for kind, registry in (("parallel", "parallel_registry"), ("aec", "aec_registry")):
        if env_id in getattr(pettingzoo, registry, {}):
            return partial(pettingzoo.make, kind, env_id)
    raise SettingError(
        f"PettingZoo {pettingzoo.__version__} has no environment {env_id!r}; give an id of its registry such as "
        "'butterfly/pistonball-v6', or a callable that returns an environment"
    )


class ParallelSource:
    """Makes worlds of a PettingZoo environment.

    Args:
        env: An id of PettingZoo's registry, a callable that returns a ParallelEnv or AECEnv, a PettingZoo module
            (`pettingzoo.butterfly.pistonball_v6`), or one environment, of which there can be but one world.
        teamwork: How the agents of a world are coordinated.
        env_kwargs: For the callable; the client's own go on top.

    Raises:
        SettingError: It is none of these.
    """

    SETTINGS: tuple[str, ...] = ("render_mode", "kwargs")

    def __init__(self, env: Any, teamwork: Teamwork, env_kwargs: Mapping[str, Any] | None = None) -> None:
        self._teamwork = teamwork
        self._kwargs = dict(env_kwargs or {})
        self._only: Any = None
        self._make: Callable[..., Any] | None
        self._isolation: Isolation | None = None
        if isinstance(env, str):
            self._make, self._title = _maker(env), env
        elif inspect.ismodule(env):
            self._make = getattr(env, "parallel_env", None) or getattr(env, "env", None)
            self._title = env.__name__
        elif hasattr(env, "possible_agents") and not inspect.isclass(env):
            self._make, self._only, self._title = None, as_parallel(env), str(env)
            if self._kwargs:
                raise SettingError("env_kwargs go to a callable; the environment that was given is made already")
        else:
            self._make, self._title = env, getattr(env, "__name__", type(env).__name__)
        if self._only is None and not callable(self._make):
            raise SettingError(
                "expected an id, a callable that returns a PettingZoo environment, a PettingZoo module, or an "
                f"environment; got {env!r:.80} of type {type(env).__name__}"
            )

    @property
    def single(self) -> bool:
        """Whether there is one environment, and so at most one world."""
        return self._make is None

    @property
    def env_ids(self) -> list[str]:
        """No ids: there is one kind of environment."""
        return []

    @property
    def title(self) -> str:
        """What to call it to a person."""
        return self._title

    @property
    def apart(self) -> bool:
        """Whether its worlds are called at the same time, under locks of their own."""
        return self._isolation is not None

    def make_world(self, name: str, settings: Mapping[str, pb.Tensor], lock: Lock) -> World:
        """Build the world that CreateWorld settings ask for.

        Raises:
            RequestError: Settings that are unknown or invalid, or an environment that could not be made.
        """
        kwargs = self._read(settings)
        if self._isolation is not None:
            env = start_isolated(name, self._recipe(kwargs), None, self._isolation)
            return MultiAgentWorld(name, env, contextlib.nullcontext(), self._teamwork)
        with lock:
            env = self.make_env(kwargs) if self._make is not None else self._take(settings)
            try:
                return MultiAgentWorld(name, env, lock, self._teamwork)
            except (Exception, SystemExit) as error:  # its spaces are the environment's own code
                raise environment_failure("its construction", error) from error

    def isolate(self, isolation: Isolation | None) -> None:
        """Make each world's environment in a process of its own from here on.

        Args:
            isolation: What each process may use; None: environments live in this process.

        Raises:
            SettingError: What is served cannot be sent to another process.
        """
        if isolation is not None and self._make is None:
            raise SettingError(
                f'isolation="process" makes each environment in a process of its own, and {self._title} is made '
                "already; give serve_parallel a callable that makes it"
            )
        self._isolation = isolation
        if isolation is not None:
            isolation.check(self._title, lambda: self._recipe(None))

    def _recipe(self, kwargs: dict[str, Any] | None) -> bytes:
        """Pickle what another process makes an environment of."""
        source = copy.copy(self)
        source._isolation, source._teamwork = None, Teamwork()
        recipe: bytes = cloudpickle.dumps((source, kwargs))
        return recipe

    def make_env(self, kwargs: Mapping[str, Any]) -> Any:
        """Make the environment, in this process.

        Raises:
            RequestError: It could not be made.
        """
        try:
            return as_parallel(self._make(**kwargs)) if self._make is not None else None
        except RequestError:
            raise
        except TypeError as error:
            raise RequestError(
                Code.INVALID_ARGUMENT, f"{self._title} could not be made with the arguments {kwargs}: {error}"
            ) from error
        except (Exception, SystemExit) as error:
            raise environment_failure("its construction", error) from error

    def _take(self, settings: Mapping[str, pb.Tensor]) -> Any:
        with _taking:
            env, self._only = self._only, None
        if settings or env is None:
            self._only = env
            raise RequestError(
                Code.FAILED_PRECONDITION,
                "this server has one environment and so one world, which takes no settings; join that which exists, or "
                "give serve_parallel a callable",
            )
        return env

    def _read(self, settings: Mapping[str, pb.Tensor]) -> dict[str, Any]:
        plain = {name: tensor for name, tensor in settings.items() if not name.startswith("kwargs.")}
        refuse_unknown(plain, (*self.SETTINGS, "kwargs.NAME"), "CreateWorld")
        try:
            kwargs = {**self._kwargs, **(read_bytes(settings, "kwargs") or {})}
            for name, tensor in settings.items():
                array = unpack_tensor(tensor, name)
                if name.startswith("kwargs."):
                    kwargs[name.removeprefix("kwargs.")] = array.item() if array.shape == () else array
                elif name == "render_mode":
                    kwargs[name] = str(array[()])
        except (TensorError, TypeError) as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad CreateWorld settings: {error}") from error
        return kwargs
