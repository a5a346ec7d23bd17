"""Recognise the kind of an environment that a user gave: one environment, lanes, or several agents.

This is the only file that tests objects for attributes. `recognise` returns a `gymnasium.Env`, a `VectorEnv` or a
`ParallelEnv`, so that all other code is written for these three types:

- an object with `num_envs`, `single_observation_space` and `single_action_space` has lanes, whatever its class:
  batched simulators are a `gymnasium.Env` (Isaac Lab), a `VectorEnv` (ManiSkill) or both (EnvPool);
- otherwise an object with `possible_agents` has several agents, unless it is a `gymnasium.Env`;
- otherwise an object with `reset`, `step` and the two spaces is one environment, even if it is no `gymnasium.Env`.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, cast

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from bridge.core.encoding.space_json import published_space
from bridge.core.gymnasium_versions import dict_space
from bridge.core.worlds.environment import EnvFacts, Spaces
from bridge.errors import Code, RequestError, SettingError

__all__ = [
    "BatchVector",
    "EnvWrapper",
    "GymEnv",
    "Joint",
    "Known",
    "Lanes",
    "ParallelEnv",
    "as_parallel",
    "attribute_layers",
    "attribute_of",
    "call_simulator",
    "defines",
    "each_lane",
    "facts_of",
    "has_attribute",
    "is_parallel",
    "layers_of",
    "local_parts",
    "metadata_of",
    "read_attribute",
    "recognise",
    "set_attribute",
    "spec_of",
]

GymEnv = gymnasium.Env[Any, Any]
Lanes = VectorEnv[Any, Any, Any]
EnvWrapper = gymnasium.Wrapper[Any, Any, Any, Any]
_OF_LANES = ("num_envs", "single_observation_space", "single_action_space")
_OF_ALL = ("reset", "step")
# Gymnasium's wrappers that keep state of one environment, and what each does to several environments, whose episodes
# end at different steps, and begin again without a `reset` that a wrapper would see. Listed by name, because some
# need extras to be imported, and older versions of Gymnasium do not have all of them.
_OF_ONE = {
    "TimeLimit": "counts the steps of one environment, and ends the episodes of all of them for ever",
    "Autoreset": "resets all of them when one ends",
    "RecordEpisodeStatistics": "adds up the rewards of one environment",
    "NormalizeReward": "keeps the return of one environment",
    "DelayObservation": "gives observations of the episode before",
    "FrameStackObservation": "stacks observations of the episode before",
    "TimeAwareObservation": "counts the steps of one environment",
    "MaxAndSkipObservation": "repeats an action until one environment ends",
    "RepeatAction": "repeats an action until one environment ends",
    "StickyAction": "repeats actions of the episode before",
    # The others derive from the first in newer versions of Gymnasium.
    **dict.fromkeys(
        ("ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"),
        "makes numbers of the rewards and flags of one environment",
    ),
}
_REMEDIES = {
    "TimeLimit": "register it without max_episode_steps, or make it with max_episode_steps=-1, and let the simulator "
    "truncate each of them",
    "RecordEpisodeStatistics": "leave it out, and use gymnasium.wrappers.vector.RecordEpisodeStatistics at the client",
    "NormalizeReward": "leave it out, and use gymnasium.wrappers.vector.NormalizeReward at the client",
    **dict.fromkeys(
        ("ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"),
        "leave it out; serve_gym(array='torch') or 'jax' gives the simulator arrays of that library",
    ),
}
# Not None, which is a possible value: `reward_space = None` says that rewards are numbers.
_MISSING = object()


Joint: TypeAlias = Mapping[Hashable, Any]
"""One value for each agent, such as its observation, by the environment's agent ids."""


class ParallelEnv(Protocol):
    """The part of PettingZoo's ParallelEnv that worlds use."""

    possible_agents: list[Hashable]
    agents: list[Hashable]

    def observation_space(self, agent: Hashable) -> Space[object]:
        """Return an agent's observation space."""

    def action_space(self, agent: Hashable) -> Space[object]:
        """Return an agent's action space."""

    def reset(self, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[Joint, Joint]:
        """Return observations and infos by agent."""

    def step(self, actions: Joint) -> tuple[Joint, Joint, Joint, Joint, Joint]:
        """Return observations, rewards, terminations, truncations and infos by agent."""

    def render(self) -> object:
        """Return a frame."""

    def close(self) -> None:
        """Close the environment."""


Known = GymEnv | Lanes | ParallelEnv
"""The result of `recognise`."""


class _Unregistered:
    """The base class of adapters for environments that derive from no Gymnasium class.

    Args:
        env: The environment, with `reset` and `step`.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.metadata: dict[str, Any] = dict(read_attribute(env, "metadata", None) or {})
        self.render_mode: str | None = read_attribute(env, "render_mode", None)
        self.spec: EnvSpec | None = spec_of(env)

    def reset(self, **given: Any) -> Any:
        """Reset the environment, with the arguments that are given: not every `reset` takes `seed` and `options`."""
        return self.env.reset(**given)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        return self.env.step(action)

    def render(self) -> Any:
        """Return the environment's frame; None: it cannot be rendered."""
        # A simulator may have `render = None` or `close = None`.
        return (read_attribute(self.env, "render", None) or (lambda: None))()

    def close(self, **keywords: object) -> None:
        """Close the environment, if it has a `close`."""
        (read_attribute(self.env, "close", None) or (lambda: None))()

    def get_wrapper_attr(self, name: str) -> object:
        """Return an attribute of the environment, or of an environment that it wraps."""
        return attribute_of(self.env, name)

    def set_wrapper_attr(self, name: str, value: object, *, force: bool = True) -> bool:
        """Set an attribute of the environment."""
        setattr(self.env, name, value)
        return True


class BatchVector(_Unregistered, Lanes):
    """Adapts a batched simulator that is no `VectorEnv` to `VectorEnv`.

    Raises:
        SettingError: A wrapper around the simulator is for one environment, and would make wrong data.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        _refuse_wrappers_of_one(env)
        self.num_envs = int(read_attribute(env, "num_envs"))
        self.single_observation_space = _space_of_lane(env, "observation_space", self.num_envs)
        self.single_action_space = _space_of_lane(env, "action_space", self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def step(self, action: Any) -> Any:
        """Step all lanes.

        Raises:
            RequestError: One flag ends the episodes of all lanes, as a wrapper for one environment would return it.
        """
        result = self.env.step(action)
        flags_by_name = zip(("terminated", "truncated"), result[2:4], strict=True) if len(result) == 5 else ()
        # NumPy would broadcast the flag to all lanes, and a trainer would learn from episodes that did not end.
        for name, flags in flags_by_name:
            if np.shape(flags) != (self.num_envs,) and np.size(flags) == 1 and bool(flags):
                raise RequestError(
                    Code.INTERNAL,
                    f"expected {name} as an array of shape ({self.num_envs},) from {_stack(self.env)}, got "
                    f"{flags!r:.80}; a wrapper for one environment must not stand around several",
                )
        return result


class _Single(_Unregistered, GymEnv):
    """Adapts one environment that is no `gymnasium.Env` to `gymnasium.Env`."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = read_attribute(env, "observation_space")
        self.action_space = read_attribute(env, "action_space")


def recognise(env: object) -> Known:
    """Return a user's environment as one of the three types that worlds step.

    Raises:
        SettingError: The object is none of them, or has lanes in a wrapper for one environment. The message begins with
            the object's class, and says what is missing or what to do.
    """
    if is_parallel(env):
        return env
    if isinstance(env, VectorEnv) and not _lacking(env):
        return env
    # Tested before `gymnasium.Env`: Isaac Lab's environments are instances of it, but step all lanes.
    if _is_batched(env):
        return BatchVector(env)
    if isinstance(env, gymnasium.Env):
        return env
    lacking = _lacking(env)
    # An object with some attributes of lanes is treated as lanes without the others.
    needed = (*_OF_ALL, *(_OF_LANES if len(lacking) < len(_OF_LANES) else ("observation_space", "action_space")))
    missing = [name for name in needed if read_attribute(env, name) is _MISSING]
    if missing or not _is_steppable(env):
        raise SettingError(
            f"a {type(env).__name__}, where a gymnasium.Env or VectorEnv was expected, or an object with what these "
            f"have: it has no {', '.join(missing or _OF_ALL)}"
        )
    return _Single(env)


def _lacking(env: object) -> list[str]:
    return [name for name in _OF_LANES if read_attribute(env, name) is _MISSING]


def _is_batched(env: object) -> bool:
    """True if an environment steps lanes, whatever its class."""
    return not _lacking(env) and _is_steppable(env) and not _is_unbatched(env)


def _is_steppable(env: object) -> bool:
    return all(callable(read_attribute(env, name)) for name in _OF_ALL)


def _is_unbatched(env: object) -> bool:
    """True if a wrapper turns a simulator with one lane into one environment, as ManiSkill's CPUGymWrapper does."""
    # A wrapper that has `num_envs` and the spaces of lanes itself is batched. Any other wrapper is what the inner
    # environment is, unless the wrapper's actions are those of one lane.
    if not isinstance(env, gymnasium.Wrapper) or all(name in dir(env) for name in _OF_LANES):
        return False
    return bool(env.action_space == read_attribute(env, "single_action_space"))


def _stack(env: object) -> str:
    """Return the classes of the wrappers, the outermost first, and of the environment, for a message."""
    names = [type(layer).__name__ for layer in layers_of(env)]
    return "<".join(names) + ">" * (len(names) - 1)


def _refuse_wrappers_of_one(env: object) -> None:
    """Raise SettingError if one of Gymnasium's wrappers for one environment wraps a batched simulator."""
    for layer in layers_of(env):
        for kind in type(layer).__mro__:
            of_gymnasium = kind.__module__.startswith("gymnasium.wrappers.") and kind.__name__ in _OF_ONE
            if not of_gymnasium or not _steps_as(type(layer), kind):
                continue
            raise SettingError(
                f"{_stack(env)}, which steps several environments at once, while {kind.__name__} is for one: it "
                f"{_OF_ONE[kind.__name__]}; {_REMEDIES.get(kind.__name__, 'leave it out')}"
            )


def _steps_as(own: type, kind: type) -> bool:
    """True if a class inherits the `step` of its base class `kind`, or calls it by `super()`."""
    step, inherited = getattr(own, "step", None), getattr(kind, "step", None)
    # Python's compiler adds this variable to each function that uses `super()`.
    return step is inherited or "__class__" in getattr(getattr(step, "__code__", None), "co_freevars", ())


def _space_of_lane(env: object, name: str, lanes: int) -> Any:
    """Return one lane's `observation_space` or `action_space`, as changed by the wrappers around a simulator.

    Raises:
        SettingError: A wrapper changed the space of all lanes to one that is not a batch of equal spaces.
    """
    single = read_attribute(env, f"single_{name}")
    for layer in layers_of(env):
        # Statically: an attribute that a wrapper only forwards from the wrapped environment does not count.
        if inspect.getattr_static(layer, f"single_{name}", _MISSING) is not _MISSING:
            break
    own, inner = getattr(env, name, None), getattr(layer, name, None)
    if own is inner or own in (inner, single):
        return single
    # The wrapper changed only the space of all lanes: RescaleAction changes the bounds, DtypeObservation the dtype.
    part = _part_of(own, lanes)
    if part is None:
        raise SettingError(
            f"{_stack(env)}, which steps {lanes} environments at once, and whose wrapper changes the {name} to "
            f"{own!r:.200}, which does not have the same space for each of them: give the wrapper a single_{name}, or "
            "leave it out"
        )
    return part


def _part_of(space: Any, lanes: int) -> Space[Any] | None:
    """Return the space of one lane, given a batched space; None: the space is no batch, or of an unknown kind."""
    part: Space[Any] | None = None
    if isinstance(space, spaces.Box) and space.shape[:1] == (lanes,):
        part = spaces.Box(space.low[0], space.high[0], space.shape[1:], cast(Any, space.dtype).type)
    elif isinstance(space, spaces.Dict):
        parts = [(key, _part_of(item, lanes)) for key, item in space.spaces.items()]
        if all(item is not None for _, item in parts):
            part = dict_space(cast(Any, parts), sort_keys=getattr(space, "sort_keys", True))
    return part if part is not None and batch_space(part, lanes) == space else None


def is_parallel(env: object) -> TypeGuard[ParallelEnv]:
    """True if an object is an environment of several agents. Classes are not: a class is a factory."""
    return hasattr(env, "possible_agents") and not (isinstance(env, (gymnasium.Env, VectorEnv)) or inspect.isclass(env))


def read_attribute(env: object, name: str, default: object = _MISSING) -> Any:
    """Return an attribute of the outermost layer of an environment that has it; `default` if no layer has it."""
    # Layer by layer, because since Gymnasium 1.0 wrappers do not forward the attributes of the wrapped environment.
    for layer in layers_of(env):
        if (value := getattr(layer, name, _MISSING)) is not _MISSING:
            return value
    return default


def attribute_of(env: object, name: str) -> Any:
    """Return an attribute or a method of an environment by a name that a user gave; raises AttributeError."""
    if isinstance(env, gymnasium.Env):
        return env.get_wrapper_attr(name)
    for layer in attribute_layers(cast(Known, env)) if is_parallel(env) else layers_of(env):
        if (value := getattr(layer, name, _MISSING)) is not _MISSING:
            return value
    served = env.env if isinstance(env, BatchVector) else env  # name the user's class in the error, not the adapter
    raise AttributeError(f"{type(served).__name__!r} object has no attribute {name!r}")


def set_attribute(env: GymEnv | ParallelEnv, name: str, value: object) -> None:
    """Set an attribute in the layer that it is read from: a new attribute of a wrapper would hide an inner one."""
    if isinstance(env, gymnasium.Env):
        env.set_wrapper_attr(name, value)
        return
    for layer in attribute_layers(env):
        if defines(layer, name):
            setattr(layer, name, value)
            return
    # Not all environments of several agents have `unwrapped`.
    setattr(read_attribute(env, "unwrapped", env), name, value)


def has_attribute(layer: object, name: str) -> bool:
    """True if a layer, that is a wrapper or the environment in it, has an attribute."""
    # The static test comes first, because a property may take long to compute.
    return defines(layer, name) or hasattr(layer, name)


def defines(layer: object, name: str) -> bool:
    """True if a layer itself has an attribute, and does not only forward that of the layer inside."""
    return inspect.getattr_static(layer, name, _MISSING) is not _MISSING


def layers_of(env: object) -> Iterator[Any]:
    """Yield the wrappers, the outermost first, then the environment in them."""
    yield env
    while isinstance(env, (gymnasium.Wrapper, VectorWrapper, _Unregistered)):
        env = env.env
        yield env


def attribute_layers(env: Known) -> Sequence[object]:
    """Return the layers in which attributes are looked up, the outermost first; empty: not in this process."""
    parts = [env] if isinstance(env, BatchVector) else local_parts(env)
    found = list(layers_of(parts[0])) if parts else []
    # PettingZoo's wrappers and conversions have many classes, which store the wrapped environment by these names.
    while found and is_parallel(env):
        attributes = getattr(found[-1], "__dict__", {})
        inner = next((attributes[name] for name in ("env", "aec_env", "_env") if name in attributes), None)
        if inner is None or any(inner is each for each in found):
            break
        found.append(inner)
    return found


def local_parts(env: Known) -> Sequence[Any]:
    """Return the environments that can be called one by one: the environment, or the lanes of a SyncVectorEnv.

    Empty: the lanes are in other processes, or in one simulator.
    """
    if not isinstance(env, VectorEnv):
        return [env]
    vector = env.unwrapped
    return vector.envs if isinstance(vector, SyncVectorEnv) else ()


def call_simulator(env: Lanes, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Sequence[object]:
    """Call a public method of a simulator once, or read an attribute; return a value for each lane.

    A result with one item per lane is treated as a batch, any other as a value that all lanes share.

    Raises:
        AttributeError: The simulator has no attribute or method of that name.
    """
    if (call := read_attribute(env, "call", None)) is not None:
        value = call(name, *args, **kwargs)
    elif callable(value := attribute_of(env, name)):
        value = value(*args, **kwargs)
    return each_lane(value, env.num_envs)


def each_lane(value: Any, lanes: int) -> Sequence[Any]:
    """Return a value that has one item per lane; repeat any other value, which all lanes share, for each lane."""
    sized = hasattr(value, "__getitem__") and hasattr(value, "__len__") and getattr(value, "shape", None) != ()
    return value if sized and not isinstance(value, (str, bytes, Mapping)) and len(value) == lanes else [value] * lanes


def spec_of(env: object) -> EnvSpec | None:
    """Return an environment's EnvSpec of Gymnasium's registry; None: there is none. EnvPool's `spec` is no EnvSpec."""
    spec = read_attribute(env, "spec", None)
    return spec if isinstance(spec, EnvSpec) else None


def metadata_of(env: object) -> Mapping[str, Any]:
    """Return an environment's metadata; empty if the environment has None or no metadata."""
    return read_attribute(env, "metadata", None) or {}


def facts_of(env: Known) -> EnvFacts:
    """Describe an environment.

    Raises:
        SettingError: The space of its rewards is no Box, each of its lanes steps several environments, or its
            `possible_agents` is empty.
    """
    *_, innermost = layers_of(env)
    kind = type(innermost).__name__
    if isinstance(env, VectorEnv):
        if any(_is_batched(lane) for lane in local_parts(env)[:1]):
            raise SettingError(
                f"expected num_envs={env.num_envs} environments that are stepped one by one, got "
                f"{_stack(local_parts(env)[0])}, which steps several at once itself: leave num_envs out, and say how "
                "many by an argument of its own, such as env_kwargs={'num_envs': 4}"
            )
        pair = _published(env.single_observation_space, env.single_action_space)
        of_gymnasium = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        # Isaac Lab and ManiSkill do not set it. Simulators that step all lanes at once reset ended lanes at once too.
        mode = metadata_of(env).get("autoreset_mode", None if of_gymnasium else AutoresetMode.SAME_STEP)
        return EnvFacts(
            kind,
            pair,
            num_envs=env.num_envs,
            reward_space=_reward_space_of(env),
            autoreset=None if mode is None else AutoresetMode(mode),
            # Simulators do not know the option `reset_mask`.
            resets_lanes=of_gymnasium,
            # Not `env.unwrapped`: stepping lanes one by one would bypass the wrappers of the vector environment.
            steps_lanes=isinstance(env, SyncVectorEnv),
        )
    if isinstance(env, gymnasium.Env):
        pair = _published(env.observation_space, env.action_space)
        return EnvFacts(kind, pair, reward_space=_reward_space_of(env))
    if not env.possible_agents:
        raise SettingError("expected an environment of several agents, got one without any in its possible_agents")
    agents = {agent: _published(env.observation_space(agent), env.action_space(agent)) for agent in env.possible_agents}
    return EnvFacts(kind, next(iter(agents.values())), agents, name=str(metadata_of(env).get("name") or ""))


def _published(observation_space: Space[object], action_space: Space[object]) -> Spaces:
    return published_space(observation_space), published_space(action_space)


def _reward_space_of(env: GymEnv | Lanes) -> Space[object] | None:
    """Return the space of an environment's rewards if they are arrays, None if they are numbers.

    The outermost wrapper with an attribute `reward_space` decides; MO-Gymnasium's LinearReward returns numbers. A
    custom wrapper that returns numbers sets `reward_space = None`. Of several lanes, the first decides.
    """
    space: Any = None
    for layer in layers_of(next(iter(local_parts(env)), env)):
        # Compared by name, because MO-Gymnasium need not be installed.
        if any(kind.__name__ == "LinearReward" for kind in type(layer).__mro__):
            break
        # Of the layer itself: a forwarded attribute says nothing about the layer's own rewards.
        if inspect.getattr_static(layer, "reward_space", _MISSING) is not _MISSING:
            space = layer.reward_space
            break
    if space is None:
        return None
    if not isinstance(space, spaces.Box):
        raise SettingError(f"expected the reward_space to be a Box, got {space!r:.200}")
    return published_space(space)


# Environments of several agents


class SingleAgentEnv:
    """Adapts a Gymnasium environment to a parallel environment with a single agent, `agent0`.

    Args:
        env: The environment; all other attributes and methods are forwarded to it.
    """

    def __init__(self, env: GymEnv) -> None:
        self._env = env
        self.possible_agents: list[Hashable] = ["agent0"]
        self.agents: list[Hashable] = []

    def __getattr__(self, name: str) -> Any:
        # Copying looks up special methods before `_env` is set, which would recurse endlessly.
        if name.startswith("_"):
            raise AttributeError(name)
        return self._env.get_wrapper_attr(name)

    def observation_space(self, agent: Hashable) -> Space[object]:
        """Return the environment's observation space."""
        return self._env.observation_space

    def action_space(self, agent: Hashable) -> Space[object]:
        """Return the environment's action space."""
        return self._env.action_space

    def reset(self, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[Joint, Joint]:
        """Reset the environment; return observation and info by agent."""
        observation, info = self._env.reset(seed=seed, options=options)
        self.agents = list(self.possible_agents)
        return {"agent0": observation}, {"agent0": info}

    def step(self, actions: Joint) -> tuple[Joint, Joint, Joint, Joint, Joint]:
        """Step the environment; return its five results by agent."""
        observation, reward, terminated, truncated, info = self._env.step(actions["agent0"])
        if terminated or truncated:
            self.agents = []
        flags: tuple[Joint, Joint] = {"agent0": terminated}, {"agent0": truncated}
        return {"agent0": observation}, {"agent0": reward}, *flags, {"agent0": info}

    def render(self) -> object:
        """Return the environment's frame."""
        return self._env.render()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def as_parallel(env: object) -> ParallelEnv:
    """Return an environment as a PettingZoo ParallelEnv; an AECEnv is converted by PettingZoo.

    A Gymnasium environment has one agent, `agent0`.

    Raises:
        SettingError: The object is no ParallelEnv, AECEnv or `gymnasium.Env`.
    """
    if isinstance(env, gymnasium.Env):
        return SingleAgentEnv(env)
    if hasattr(env, "agent_iter"):
        from pettingzoo.utils import conversions

        # The agents of a turn-based game act one by one: `aec_to_parallel` refuses such a game.
        parallelizable = metadata_of(env).get("is_parallelizable", False)
        convert = conversions.aec_to_parallel if parallelizable else conversions.turn_based_aec_to_parallel
        return cast(ParallelEnv, convert(env))
    missing = [name for name in ("possible_agents", "observation_space", "action_space") if not hasattr(env, name)]
    if missing or not _is_steppable(env):
        raise SettingError(
            f"expected a PettingZoo ParallelEnv or AECEnv, got {env!r:.80} of type {type(env).__name__}, which has no "
            f"{', '.join(missing)}"
        )
    return cast(ParallelEnv, env)
