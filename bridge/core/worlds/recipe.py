"""How a server makes environments: from an id, a spec, a callable, or a list of ids and patterns."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from bridge.core.worlds.base import answer_to
from bridge.core.worlds.kinds import EnvWrapper, GymEnv, Lanes, recognise
from bridge.core.worlds.settings import SentKwargs, Settings, read_choice, read_kwargs, read_scalar, read_string, wrong
from bridge.errors import Code, RequestError, SettingError

__all__ = ["MODES", "SETTINGS", "Adapter", "EnvLike", "EnvRecipe", "LanesAlreadyError", "constructed", "similar_ids"]

EnvLike: TypeAlias = "str | EnvSpec | Callable[..., object] | Sequence[str]"
"""The types of the argument `env` of `serve_gym`."""

MODES = ("sync", "async", "vector_entry_point")
SETTINGS = ("env_id", "num_envs", "vectorization_mode", "render_mode", "kwargs")
"""The settings of CreateWorld."""
T = TypeVar("T")
_VERSION = re.compile(r"-v\d+$")


class Adapter(Protocol):
    """Wraps environments, and changes their actions or results. It can be pickled."""

    def wrap(self, env: GymEnv) -> EnvWrapper:
        """Return one environment, or one lane of several, with the change."""

    def wrap_lanes(self, env: Lanes) -> Lanes:
        """Return lanes that are stepped together with the change; raises SettingError if that is not possible."""

    def describe(self) -> Mapping[str, object]:
        """Return the entries for a recording, by keyword."""


class LanesAlreadyError(RequestError):
    """Lanes were requested of an environment that has lanes itself.

    Args:
        title: The name of the environment.
        count: The number of its lanes.
        env: The vector environment from which this was seen, which is still open; None: it is closed.
    """

    def __init__(self, title: str, count: int, env: Lanes | None = None) -> None:
        text = f"{title} returns a vector environment of {count} lanes, so num_envs cannot be given"
        super().__init__(Code.INVALID_ARGUMENT, text)
        self.env = env


@dataclasses.dataclass(frozen=True)
class EnvRecipe:
    """How to make environments: those of a server or, after `read`, that of one of its worlds.

    It can be pickled for another process if its parts can.
    """

    factory: Callable[..., Any] | None
    """Returns an Env or a VectorEnv."""
    spec: EnvSpec | None
    """The environment to make, if there is no factory; also for a process in which it is not registered."""
    patterns: tuple[str, ...] = ()
    """The ids that a client may choose from, if there is neither factory nor spec."""
    num_envs: int = 1
    vectorization_mode: str = "sync"
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    max_lanes: int = 4096
    adapters: tuple[Adapter, ...] = ()
    """The adapters that wrap each environment, the innermost first."""
    hands_over: bool = False
    """True: LanesAlreadyError passes on the vector environment that was made in vain, for the next world."""

    @classmethod
    def of(cls, env: EnvLike, **options: Any) -> EnvRecipe:
        """Read the argument `env` of a user.

        Raises:
            SettingError: It cannot be served, such as an id that is not registered.
        """
        if isinstance(env, str):
            return cls(None, _find(env), **options)
        if isinstance(env, EnvSpec):
            return cls(None, env, **options)
        if callable(env):
            return cls(env, None, **options)
        if isinstance(env, Sequence) and env and all(isinstance(item, str) for item in env):
            missing = [pattern for pattern in env if not _matching(pattern)]
            if missing:
                close = [each for pattern in missing for each in similar_ids(pattern)]
                hint = f"; did you mean {' and '.join(close)}? Otherwise" if close else ";"
                raise SettingError(
                    f"no registered environment matches {', '.join(map(repr, missing))}{hint} import the package that "
                    "registers it first"
                )
            return cls(None, None, tuple(env), **options)
        raise SettingError(
            "expected a Gymnasium id, an EnvSpec, a callable that makes a new environment, or a list of ids; got "
            f"{env!r:.80} of type {type(env).__name__}"
        )

    @property
    def env_ids(self) -> list[str]:
        """The ids that a client may request; empty if there is only one environment, without an id."""
        if self.patterns:
            return list(dict.fromkeys(name for pattern in self.patterns for name in _matching(pattern)))
        return [self.spec.id] if self.spec else []

    @property
    def title(self) -> str:
        """The name, for people to read."""
        if self.factory is not None:
            return getattr(self.factory, "__name__", type(self.factory).__name__)
        return ", ".join(self.patterns) or (self.spec.id if self.spec else "")

    @property
    def single(self) -> bool:
        """True if a world has one environment, not lanes."""
        return self.num_envs == 1 and self.vectorization_mode == "sync"

    def read(self, settings: Settings) -> EnvRecipe:
        """Read CreateWorld settings; return the recipe of the requested world.

        Raises:
            RequestError: INVALID_ARGUMENT for unknown or bad settings, NOT_FOUND for an environment not served here.
        """
        kwargs = read_kwargs(settings, SETTINGS, self.kwargs)
        env_id = read_string(settings, "env_id", "CreateWorld")
        modes = list(dict.fromkeys((self.vectorization_mode, *MODES)))  # the first is the default
        mode = read_choice(settings, "vectorization_mode", modes, "CreateWorld")
        num_envs = _count(settings, "num_envs", self.max_lanes) or self.num_envs
        spec = self._resolve(env_id)
        return dataclasses.replace(
            self, spec=spec, patterns=(), num_envs=num_envs, vectorization_mode=mode, kwargs=kwargs
        )

    def _resolve(self, env_id: str | None) -> EnvSpec | None:
        """Return the served environment that a client requests."""
        served = self.env_ids
        if env_id is None:
            if len(served) > 1:
                raise RequestError(
                    Code.INVALID_ARGUMENT,
                    "name one of the environments, in the path of the URL or by env_id: this server has "
                    f"{_some(served)}",
                )
            env_id = served[0] if served else None
        elif env_id not in served:
            offer = _some(served) or f"one environment, {self.title}, without an id"
            text = f"the environment {env_id!r} is not served here; this server has {offer}"
            raise RequestError(Code.NOT_FOUND, text)
        return self.spec or (gymnasium.spec(env_id) if env_id else None)

    def make_env(self) -> GymEnv | Lanes:
        """Make the environment of a world.

        Raises:
            RequestError: It could not be made.
        """
        return constructed(self.title, self.kwargs, self._make, self._constructor)

    def _make(self) -> GymEnv | Lanes:
        if self.factory is not None:
            return self._make_by_factory(self.factory)
        assert self.spec is not None, "`read` found it"
        kwargs: dict[str, Any] = dict(self.kwargs)
        if self.single:
            return self._adapted(gymnasium.make(self.spec, **kwargs))
        # For these lanes Gymnasium accepts no wrappers of one environment.
        stepped_together = self.vectorization_mode == "vector_entry_point"
        # The results of lanes are sent before their next step, so they need no copy.
        vector_kwargs: dict[str, Any] = {} if stepped_together else {"copy": False}
        if self.vectorization_mode == "async":
            from bridge.core.worlds.forkserver import async_options, ended_by_kill  # imported only if it is used

            vector_kwargs.update(async_options())
        wrappers: list[Any] = [] if stepped_together else [adapter.wrap for adapter in self.adapters]
        with _closing_on_failure() as note:
            vector: Lanes = gymnasium.make_vec(
                self.spec,
                num_envs=self.num_envs,
                vectorization_mode=self.vectorization_mode,
                vector_kwargs=vector_kwargs,
                # The processes of "async" cannot pass on their environments, and close them themselves.
                wrappers=[*wrappers, note] if self.vectorization_mode == "sync" else wrappers or None,
                **kwargs,
            )
        if self.vectorization_mode == "async" and isinstance(vector.unwrapped, AsyncVectorEnv):
            ended_by_kill(vector.unwrapped)
        return self._adapted(vector) if stepped_together else vector

    def _adapted(self, made: object) -> GymEnv | Lanes:
        """Return the result of a callable as an environment of Gymnasium, in the adapters; raises if it is another."""
        try:
            env = recognise(made)
        except SettingError as error:
            raise RequestError(Code.FAILED_PRECONDITION, f"{self.title} returned {error}") from error
        if not isinstance(env, (gymnasium.Env, VectorEnv)):
            raise RequestError(
                Code.FAILED_PRECONDITION,
                f"{self.title} returned a {type(made).__name__}, where a gymnasium.Env or VectorEnv was expected; "
                "PettingZoo environments are for serve_parallel, or for `gymnasium-bridge serve` with a function that "
                "says what it returns: def make() -> pettingzoo.ParallelEnv",
            )
        for adapter in self.adapters:
            env = adapter.wrap_lanes(env) if isinstance(env, VectorEnv) else adapter.wrap(env)
        return env

    def _make_by_factory(self, factory: Callable[..., Any]) -> GymEnv | Lanes:
        if self.single:
            return self._adapted(factory(**self.kwargs))
        if self.vectorization_mode == "vector_entry_point":
            raise RequestError(
                Code.INVALID_ARGUMENT,
                f"{self.title} is a callable, which has no vector entry point; expected vectorization_mode sync or "
                "async, or a callable that returns a VectorEnv",
            )
        if self.vectorization_mode == "async":
            from bridge.core.worlds.forkserver import async_options, ended_by_kill  # imported only if it is used

            one = [lambda: self._one(factory)]
            return ended_by_kill(AsyncVectorEnv(one * self.num_envs, copy=False, **async_options()))
        first = self._adapted(factory(**self.kwargs))
        if isinstance(first, VectorEnv):
            if not self.hands_over:
                first.close()
            raise LanesAlreadyError(self.title, first.num_envs, first if self.hands_over else None)
        # The environment that was made to see the function's result becomes the first lane.
        made = [first]
        with _closing_on_failure() as note:
            make = lambda: note(made.pop() if made else self._one(factory))  # noqa: E731
            return SyncVectorEnv([make] * self.num_envs, copy=False)

    def _one(self, factory: Callable[..., object]) -> GymEnv:
        env = self._adapted(factory(**self.kwargs))
        assert not isinstance(env, VectorEnv), "the same function made one environment before"
        return env

    def _constructor(self) -> tuple[object, Mapping[str, object]]:
        """Return the environment's constructor, or its name, and the arguments that it gets."""
        if self.spec is None:
            return self.factory, self.kwargs
        # `gymnasium.make` does not pass on its own arguments, such as `max_episode_steps`.
        of_make = inspect.signature(gymnasium.make).parameters
        arguments = {**self.spec.kwargs, **{key: value for key, value in self.kwargs.items() if key not in of_make}}
        if self.vectorization_mode == "vector_entry_point" and not self.single:
            return self.spec.vector_entry_point, {**arguments, "num_envs": self.num_envs}
        return self.spec.entry_point, arguments


@contextlib.contextmanager
def _closing_on_failure() -> Iterator[Callable[[Any], Any]]:
    """Yield a function that records environments; close the recorded ones if an exception is raised within."""
    made: list[GymEnv] = []

    def note(env: GymEnv) -> GymEnv:
        made.append(env)
        return env

    try:
        yield note
    except BaseException:
        for env in made:
            # The error that caused this is reported.
            with contextlib.suppress(Exception):
                env.close()
        raise
    finally:
        made.clear()


def constructed(
    title: str,
    kwargs: Mapping[str, object],
    make: Callable[[], T],
    constructor: Callable[[], tuple[object, Mapping[str, object]]],
) -> T:
    """Return the result of `make`, or report whether the arguments or the environment are at fault.

    Args:
        title: The environment's name, for the message.
        kwargs: The arguments, for the message. While `make` runs, names in a client's arguments are not imported.
        make: Calls the constructor.
        constructor: Called after a TypeError: returns the constructor, or its name, and the arguments that it got.

    Raises:
        RequestError: INVALID_ARGUMENT: the constructor does not take the arguments; otherwise as `answer_to`.
    """
    try:
        with _importing_nothing() if isinstance(kwargs, SentKwargs) else contextlib.nullcontext():
            return make()
    except RequestError:
        raise
    except (Exception, SystemExit) as error:
        # Other errors are the environment's own, even a TypeError, and are reported with their traceback. The signature
        # decides, not the message, because a TypeError may come from the environment's own code.
        wrong = _misfit(*constructor()) if isinstance(error, TypeError) else None
        if wrong is None:
            raise answer_to("its construction", error) from error
        text = f"{title} could not be made with env_kwargs={dict(kwargs)}: {error}. {wrong}"
        raise RequestError(Code.INVALID_ARGUMENT, text) from error


def _importing_nothing() -> contextlib.AbstractContextManager[None]:
    """While it is entered, packages of URL schemes are not imported, whatever the arguments name."""
    from bridge.core.plugins import for_a_client  # few clients send arguments

    return for_a_client()


def _misfit(constructor: Any, arguments: Mapping[str, object]) -> str | None:
    """Return a sentence with a constructor's parameters, if it does not take these arguments; None: it may."""
    try:
        if isinstance(constructor, str):
            constructor = gymnasium.envs.registration.load_env_creator(constructor)
        signature = inspect.signature(constructor)
    except (TypeError, ValueError, ImportError, AttributeError, gymnasium.error.Error):
        return None
    try:
        signature.bind(**arguments)
    except TypeError:
        return f"It takes {signature}"
    return None


def _matching(pattern: str) -> list[str]:
    """Return the ids that a pattern matches.

    This package's ids match only if given in full: with `*`, clients could make this server connect to any address.
    """
    return [each for each in fnmatch.filter(gymnasium.registry, pattern) if each == pattern or each[:7] != "bridge/"]


def _find(env_id: str) -> EnvSpec:
    try:
        # `module:Name-v0` imports the module, which only the server's own user may request.
        module, _, name = env_id.rpartition(":")
        if module:
            __import__(module)
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        raise SettingError(f"cannot serve {env_id!r}: {_not_found(env_id, error)}") from None


def _not_found(env_id: str, error: Exception) -> str:
    """Return why there is no such id, and what to do."""
    # Gymnasium's own suggestion is an id without a version, which cannot be made.
    why = str(error).partition(" Did you mean")[0].rstrip(".")
    why += "" if why.endswith("?") else "."
    close = [] if isinstance(error, ImportError) else similar_ids(env_id)
    if close:
        # A user who wrote a module needs no hint on where the id comes from.
        other = "" if ":" in env_id else " Otherwise import the package that registers it, or write MODULE:ENV_ID"
        return f"{why} Did you mean {' or '.join(close)}?{other}"
    if env_id.startswith("ALE/"):
        return f"{why} pip install 'gymnasium[atari]', and write ale_py:{env_id}"
    return f"{why} Import the package that registers it first, or write MODULE:ENV_ID"


def similar_ids(name: str) -> list[str]:
    """Return at most three registered ids that are similar to `name`, each in its newest version.

    `CartPole`, `cartpole-v1`, `CartPole-v9` and `CartPoll` give `CartPole-v1`, and `Pong` gives `ALE/Pong-v5`. If the
    name has a module, such as `ale_py:Pong`, the ids begin with it too, because it registers them.
    """
    module, colon, name = name.rpartition(":")
    newest: dict[str, tuple[int, str]] = {}
    for env_id, spec in gymnasium.registry.items():
        if not env_id.startswith("bridge/"):  # as in `_matching`
            version = -1 if spec.version is None else spec.version
            plain = _VERSION.sub("", env_id).lower()
            newest[plain] = max(newest.get(plain, (-1, "")), (version, env_id))
    asked = _VERSION.sub("", name).lower()
    same = [asked] if asked in newest else [plain for plain in newest if plain.endswith(f"/{asked}")]
    found = same or difflib.get_close_matches(asked, newest, 3, 0.7)
    return [f"{module}{colon}{newest[plain][1]}" for plain in found[:3]]


def _count(settings: Settings, name: str, most: int) -> int | None:
    value = read_scalar(settings, name, "CreateWorld")
    if value is None:
        return None
    if not isinstance(value, np.integer) or not 1 <= value <= most:
        raise wrong(repr(name), f"an integer from 1 to {most}", value)
    return int(value)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"
