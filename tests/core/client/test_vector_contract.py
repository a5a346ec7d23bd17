"""One battery of expectations for Gymnasium's SyncVectorEnv and for remote slots and lanes, in every autoreset mode.

The expectations come from environments that are stepped one by one in this process, by the rules of each mode.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, iterate

from bridge import make_vec_remote, serve_gym
from bridge.testing import EVERY_SPACE, SpaceEnv
from bridge.wrappers import BlockingReset
from tests.support import SmallNumbers, assert_identical, assert_same_space, everywhere, minigrid, sampled

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's remarks about its own environments
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EnvFn = Callable[[], gymnasium.Env[Any, Any]]
NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
SLOTS = 4


class SomeOptions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes empty options as none: SyncVectorEnv's masked reset cannot give a lane None, as its own autoreset does."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.env.reset(seed=seed, options=options or None)


def spaced(name: str, actions: str = "discrete_start") -> EnvFn:
    return lambda: SmallNumbers(SomeOptions(SpaceEnv(EVERY_SPACE[name](), EVERY_SPACE[actions](), max_steps=6)))


TAXI = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"  # of Gymnasium before 1.3
ENVIRONMENTS: dict[str, tuple[EnvFn, int]] = {
    "CartPole": (lambda: gymnasium.make("CartPole-v1"), 120),
    "Taxi": (lambda: gymnasium.make(TAXI), 220),
    "Pendulum": (lambda: gymnasium.make("Pendulum-v1", max_episode_steps=20), 60),
    "Blackjack": (lambda: gymnasium.make("Blackjack-v1"), 60),
    "FrozenLake": (lambda: gymnasium.make("FrozenLake-v1"), 60),
    "MiniGrid": (lambda: minigrid(max_steps=20), 50),
    "discrete with a start": (spaced("discrete_start"), 40),
    "boxes of bounds": (spaced("box_per_element", "box_float32"), 40),
    "everything nested": (spaced("mixed", "dict_nested"), 30),
    "image": (spaced("box_image"), 30),
}


class Expected:
    """A model of a vector environment, worked out one environment at a time."""

    def __init__(self, function: EnvFn, mode: AutoresetMode) -> None:
        self.envs = [function() for _ in range(SLOTS)]
        self.mode = mode
        self.rows: list[Any] = [None] * SLOTS
        self.over = [False] * SLOTS

    def reset(
        self, seeds: Sequence[int | None], mask: Sequence[bool], options: Any
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        infos: list[dict[str, Any]] = [{} for _ in self.envs]
        for slot, env in enumerate(self.envs):
            if mask[slot]:
                self.rows[slot], infos[slot] = env.reset(seed=seeds[slot], options=options)
                self.over[slot] = False
        return list(self.rows), infos

    def step(self, actions: Sequence[Any]) -> tuple[list[Any], list[float], list[bool], list[bool], list[Any]]:
        rewards, terminations, truncations = [0.0] * SLOTS, [False] * SLOTS, [False] * SLOTS
        infos: list[dict[str, Any]] = [{} for _ in self.envs]
        for slot, env in enumerate(self.envs):
            if self.over[slot] and self.mode is NEXT:
                self.rows[slot], infos[slot] = env.reset()
                self.over[slot] = False
                continue
            self.rows[slot], reward, terminations[slot], truncations[slot], info = env.step(actions[slot])
            rewards[slot] = float(reward)
            self.over[slot] = terminations[slot] or truncations[slot]
            if self.over[slot] and self.mode is SAME:
                final = {"final_obs": self.rows[slot], "final_info": info}
                self.rows[slot], info = env.reset()
                info = {**final, **info}
                self.over[slot] = False
            infos[slot] = info
        return list(self.rows), rewards, terminations, truncations, infos

    def close(self) -> None:
        for env in self.envs:
            env.close()


Make = Callable[[EnvFn, AutoresetMode], Any]


@contextmanager
def sync(function: EnvFn, mode: AutoresetMode) -> Iterator[VectorEnv[Any, Any, Any]]:
    envs = SyncVectorEnv([function] * SLOTS, autoreset_mode=mode)
    yield envs
    envs.close()


def remote(lanes: Sequence[int]) -> Make:
    @contextmanager
    def make(function: EnvFn, mode: AutoresetMode) -> Iterator[VectorEnv[Any, Any, Any]]:
        with ExitStack() as stack:
            servers = {count: stack.enter_context(serve_gym(function, num_envs=count)) for count in set(lanes)}
            envs = BlockingReset(make_vec_remote([servers[count].url for count in lanes]), autoreset_mode=mode)
            stack.callback(envs.close)
            yield envs

    return make


MAKERS: dict[str, Make] = {
    "SyncVectorEnv": sync,
    "slots": remote([1, 1, 1, 1]),
    "lanes": remote([4]),
    "lanes and slots": remote([1, 2, 1]),
}


def check_infos(infos: dict[str, Any], own: Sequence[dict[str, Any]], where: str) -> None:
    """Hold infos against each slot's own, joined by the base class's rules: arrays of the first one's dtype, masks."""
    rules: VectorEnv[Any, Any, Any] = VectorEnv()
    rules.num_envs = SLOTS
    joined: dict[str, Any] = {}
    for slot, info in enumerate(own):
        joined = rules._add_info(joined, copy.deepcopy(info), slot)
    assert_identical(infos, joined, where)


def arrays(batch: Any) -> Iterator[Any]:
    if isinstance(batch, np.ndarray):
        yield batch
    elif isinstance(batch, (dict, tuple)):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from arrays(part)


class Battery:
    """Steps a vector environment beside what is expected of it."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], function: EnvFn, mode: AutoresetMode) -> None:
        self.envs, self.mode = envs, mode
        self.expected = Expected(function, mode)
        self.kept: list[tuple[Any, Any]] = []
        local = self.expected.envs[0]
        assert envs.num_envs == SLOTS
        assert_same_space(envs.single_observation_space, local.observation_space)
        assert_same_space(envs.single_action_space, local.action_space)
        assert_same_space(envs.observation_space, batch_space(local.observation_space, SLOTS))
        assert_same_space(envs.action_space, batch_space(local.action_space, SLOTS))
        assert envs.metadata["autoreset_mode"] is mode
        assert envs.autoreset_mode is mode  # type: ignore[attr-defined]
        self.actions = batch_space(local.action_space, SLOTS)
        self.actions.seed(7)

    def observations(self, batch: Any, rows: Sequence[Any], where: str) -> None:
        found = list(iterate(self.envs.observation_space, batch))
        assert len(found) == SLOTS
        for slot, (mine, theirs) in enumerate(zip(found, rows, strict=True)):
            assert_identical(mine, theirs, f"{where}: the observation of slot {slot}")
        for array in arrays(batch):
            assert array.flags.writeable, f"{where}: an observation cannot be written to"
            assert not any(np.shares_memory(array, other) for kept, _ in self.kept[-3:] for other in arrays(kept))
        self.keep(batch)

    def keep(self, batch: Any) -> None:
        self.kept.append((batch, copy.deepcopy(batch)))

    def reset(self, seed: Any = None, mask: Any = None) -> None:
        if isinstance(seed, list):
            seeds = seed
        else:
            seeds = [None] * SLOTS if seed is None else [seed + slot for slot in range(SLOTS)]
        if mask is None:
            rows, own = self.expected.reset(seeds, [True] * SLOTS, None)
        else:
            rows, own = self.expected.reset(seeds, mask.tolist(), {})  # what is left of the options without the mask
        batch, infos = self.envs.reset(seed=seed, options=None if mask is None else {"reset_mask": mask.copy()})
        self.observations(batch, rows, "reset")
        check_infos(infos, own, "the infos of a reset")

    def step(self) -> np.ndarray[Any, Any]:
        actions = self.actions.sample()
        rows, rewards, terminations, truncations, own = self.expected.step(list(iterate(self.actions, actions)))
        batch, *numbers, infos = self.envs.step(actions)
        self.observations(batch, rows, "step")
        dtypes = (np.float64, np.bool_, np.bool_)
        for mine, theirs, dtype in zip(numbers, (rewards, terminations, truncations), dtypes, strict=True):
            assert_identical(mine, np.array(theirs, dtype), "reward, terminations or truncations")
            assert mine.flags.writeable
            self.keep(mine)
        check_infos(infos, own, "the infos of a step")
        over = np.array(self.expected.over)
        if self.mode is DISABLED and over.any():
            self.reset(mask=over)
        return over

    def unchanged(self) -> None:
        for batch, as_it_was in self.kept:
            assert_identical(batch, as_it_was, "what a later step wrote into")

    def run(self, steps: int) -> None:
        """Play, with seeded, unseeded and masked resets in between."""
        generator = np.random.default_rng(3)
        self.reset(seed=11)
        for step in range(steps):
            over = self.step()
            if step % 9 == 8:
                # Slots that have just ended, and others too.
                mask = over | (generator.random(SLOTS) < 0.3)
                if mask.any():
                    self.reset(seed=step if step % 2 else None, mask=mask)
        self.reset(seed=[5, None, 6, 5])
        for _ in range(10):
            self.step()
        self.reset(seed=11)
        self.step()
        self.reset()
        if self.mode is DISABLED:
            self.refused()
        self.unchanged()
        self.expected.close()

    def refused(self) -> None:
        """Step until an episode ends, and once more: the last thing, as SyncVectorEnv steps the slots before it."""
        over = np.zeros(SLOTS, np.bool_)
        while not over.any():
            _, _, terminations, truncations, _ = self.envs.step(self.actions.sample())
            over = terminations | truncations
        refusal = None
        try:
            self.envs.step(self.actions.sample())
        except (AssertionError, gymnasium.error.ResetNeeded) as error:
            refusal = error
        assert refusal is not None, "a step of a finished slot was not refused"


def play(make: Make, name: str, mode: AutoresetMode) -> None:
    function, steps = ENVIRONMENTS[name]
    with make(function, mode) as envs:
        Battery(envs, function, mode).run(steps)


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize(("name", "maker"), sampled(itertools.product(ENVIRONMENTS, MAKERS), 9))
def test_the_contract_is_gymnasiums(name: str, maker: str, mode: AutoresetMode) -> None:
    play(MAKERS[maker], name, mode)


# The faults that the battery must catch, each put into our own environment.


class Faulty(VectorWrapper):
    """Changes what a step returns."""

    def __init__(self, env: VectorEnv[Any, Any, Any], change: Callable[..., Any] = lambda *results: results) -> None:
        super().__init__(env)
        self.change = change
        self.autoreset_mode = env.autoreset_mode  # type: ignore[attr-defined]

    def step(self, actions: Any) -> Any:
        return self.change(*self.env.step(actions))


def read_only(observations: Any, *rest: Any) -> Any:
    observations.setflags(write=False)
    return (observations, *rest)


def float32_rewards(observations: Any, rewards: Any, *rest: Any) -> Any:
    return (observations, rewards.astype(np.float32), *rest)


def reused_buffer() -> Callable[..., Any]:
    buffers: list[Any] = []

    def change(observations: Any, *rest: Any) -> Any:
        if not buffers:
            buffers.append(observations)
        buffers[0][...] = observations
        return (buffers[0], *rest)

    return change


def leaking_infos(*results: Any) -> Any:
    infos = results[-1]
    for key, value in infos.items():
        if key.startswith("_"):
            value[...] = value.any()
    return results


def truncation_as_termination(*results: Any) -> Any:
    observations, rewards, terminations, truncations, infos = results
    return observations, rewards, terminations | truncations, np.zeros_like(truncations), infos


def fails(change: Callable[..., Any], name: str, mode: AutoresetMode) -> None:
    """Expect the battery to notice a change of what a step returns."""
    function, steps = ENVIRONMENTS[name]
    with MAKERS["lanes and slots"](function, mode) as envs, pytest.raises(AssertionError):
        Battery(Faulty(envs, change), function, mode).run(steps)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (read_only, "CartPole"),
        (float32_rewards, "CartPole"),
        (reused_buffer(), "CartPole"),
        (truncation_as_termination, "Pendulum"),
        (leaking_infos, "everything nested"),
    ],
    ids=["read-only observations", "float32 rewards", "a reused buffer", "truncation as termination", "leaking infos"],
)
def test_the_battery_catches_a_changed_step(change: Callable[..., Any], name: str) -> None:
    fails(change, name, SAME if change is leaking_infos else NEXT)


class LostStart(Faulty):
    """Says of a Discrete observation no more than how many values it has."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        space = env.single_observation_space
        assert isinstance(space, gymnasium.spaces.Discrete)
        self.single_observation_space = gymnasium.spaces.Discrete(int(space.n))


class Unchecked(Faulty):
    """Steps finished slots as if nothing were wrong."""

    def step(self, actions: Any) -> Any:
        with suppress(gymnasium.error.ResetNeeded):
            self.last = self.env.step(actions)
        return self.last


class SwallowedStep(Faulty):
    """Where a masked reset began the episode of a slot that had ended, its next step begins one more."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.over = self.swallow = np.zeros(SLOTS, np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = np.ones(SLOTS, np.bool_) if options is None else options["reset_mask"]
        self.swallow, self.over = self.over & mask if options else ~mask, self.over & ~mask
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        _, _, terminations, truncations, _ = results = self.env.step(actions)
        self.over = terminations | truncations
        if self.swallow.any():
            observations, infos = self.env.reset(options={"reset_mask": self.swallow})
            results = (observations, *results[1:4], infos)
            self.swallow = np.zeros(SLOTS, np.bool_)
        return results


class SeedOnce(Faulty):
    """Takes the seed of its first reset alone."""

    seeded = False

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        seed, self.seeded = None if self.seeded else seed, True
        return self.env.reset(seed=seed, options=options)


def test_the_battery_passes_what_changes_nothing() -> None:
    """Else it would be the wrapper that the tests below see caught."""
    function, steps = ENVIRONMENTS["CartPole"]
    with MAKERS["slots"](function, NEXT) as envs:
        Battery(Faulty(envs), function, NEXT).run(steps)


@pytest.mark.parametrize(
    ("fault", "maker", "name", "mode", "said"),
    [
        (LostStart, "slots", "discrete with a start", NEXT, ""),
        (Unchecked, "lanes and slots", "CartPole", DISABLED, "not refused"),
        (SwallowedStep, "slots", "CartPole", NEXT, ""),
        (SeedOnce, "slots", "CartPole", SAME, ""),
    ],
    ids=["a lost start", "unchecked stepping", "a step swallowed after a masked reset", "seeds that count once"],
)
def test_the_battery_catches_a_fault(fault: Any, maker: str, name: str, mode: AutoresetMode, said: str) -> None:
    function, steps = ENVIRONMENTS[name]
    with MAKERS[maker](function, mode) as envs, pytest.raises(AssertionError, match=said):
        Battery(fault(envs), function, mode).run(steps)


# What the battery does not go through.


@pytest.fixture
def envs(isolation: Any) -> Iterator[BlockingReset]:
    """Four slots: a world of two lanes, and two of one."""
    with (
        serve_gym("CartPole-v1", num_envs=2, isolation=isolation) as lanes,
        serve_gym("CartPole-v1", isolation=isolation) as one,
    ):
        made = BlockingReset(make_vec_remote([one.url, lanes.url, one.url]))
        yield made
        made.close()


@everywhere
def test_the_callers_options_stay_as_they_are(envs: BlockingReset) -> None:
    envs.reset(seed=1)
    mask = np.array([True, False, True, False])
    options = {"reset_mask": mask, "low": -0.01, "high": 0.01}
    envs.reset(options=options)
    assert list(options) == ["reset_mask", "low", "high"]
    assert options["reset_mask"] is mask


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        ([True] * 4, TypeError),
        (np.ones(3, np.bool_), ValueError),
        (np.ones(4, np.int64), TypeError),
        (np.zeros(4, np.bool_), ValueError),
    ],
)
def test_reset_masks_are_checked_as_gymnasium_does(envs: BlockingReset, mask: Any, kind: type[Exception]) -> None:
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
    for each in (envs, local):
        each.reset(seed=1)
        with pytest.raises(kind):
            each.reset(options={"reset_mask": mask})
    local.close()


@pytest.mark.parametrize("seed", [[1, 2], list(range(5))])
def test_a_list_of_seeds_of_another_length_is_refused(envs: BlockingReset, seed: list[int]) -> None:
    with pytest.raises(ValueError, match="one seed for each"):
        envs.reset(seed=seed)


@everywhere
def test_generators_and_seeds_are_those_of_the_slots(envs: BlockingReset) -> None:
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
    for each in (envs, local):
        each.reset(seed=40)
        each.step(np.zeros(4, np.int64))
    assert envs.np_random_seed == local.np_random_seed == (40, 41, 42, 43)
    drawn = [generator.standard_normal(3).tolist() for generator in envs.np_random]  # type: ignore[attr-defined]
    assert drawn == [copy.deepcopy(generator).standard_normal(3).tolist() for generator in local.np_random]
    # What was drawn from the copies does not count in the remotes.
    assert_identical(envs.reset()[0], local.reset()[0])
    assert len(envs.get_attr("np_random")) == 4
    local.close()


@everywhere
def test_attributes_and_methods_are_those_of_sync_vector_env(envs: BlockingReset) -> None:
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
    for each in (envs, local):
        each.reset(seed=1)
        each.set_attr("length", [0.5, 0.6, 0.7, 0.8])  # type: ignore[attr-defined]
        assert each.get_attr("length") == (0.5, 0.6, 0.7, 0.8)  # type: ignore[attr-defined]
        each.set_attr("length", 0.25)  # type: ignore[attr-defined]
        assert each.call("length") == (0.25,) * 4  # type: ignore[attr-defined]
        assert each.call("has_wrapper_attr", "no such attribute") == (False,) * 4  # type: ignore[attr-defined]
        assert each.get_attr("action_space") == (gymnasium.spaces.Discrete(2),) * 4  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="4"):
            each.set_attr("length", [1.0])  # type: ignore[attr-defined]
    local.close()


@everywhere
def test_some_slots_alone_are_called_and_set(envs: BlockingReset) -> None:
    envs.reset(seed=1)
    envs.env.set_attr_at([1, 3], "length", 2.0)
    assert envs.get_attr("length") == (0.5, 2.0, 0.5, 2.0)
    # Of lanes, too, only those that are named are called.
    assert envs.env.call_at([3, 0], "set_wrapper_attr", "length", 3.0) == (True, True)
    assert envs.get_attr("length") == (3.0, 2.0, 0.5, 3.0)
    with pytest.raises(ValueError, match="slots from 0 to 3"):
        envs.env.call_at([4], "length")


def test_frames_are_a_tuple_of_those_of_the_slots() -> None:
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1", render_mode="rgb_array")] * 3)
    with serve_gym("CartPole-v1", num_envs=2) as lanes, serve_gym("CartPole-v1") as one:
        envs = BlockingReset(make_vec_remote([lanes.url, one.url], render_mode="rgb_array"))
        assert envs.render_mode == "rgb_array"
        for each in (envs, local):
            each.reset(seed=5)
            each.step(np.ones(3, np.int64))
        frames = envs.render()
        assert isinstance(frames, tuple)
        assert_identical(frames, local.render())
        assert_identical(envs.call("render"), local.render())
        envs.close()
    local.close()


def test_close_may_be_called_twice(envs: BlockingReset) -> None:
    envs.reset()
    envs.close()
    assert envs.closed
    envs.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        envs.step(np.zeros(4, np.int64))
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        envs.reset()


def test_an_unknown_autoreset_mode_is_refused(envs: BlockingReset) -> None:
    assert BlockingReset(envs.env, autoreset_mode="SameStep").autoreset_mode is SAME
    with pytest.raises(ValueError, match="NextStep"):
        BlockingReset(envs.env, autoreset_mode="sometimes")


class Picture(gymnasium.Env):
    """Gives pictures, and ends after a step in the way that its action says."""

    observation_space = spaces.Box(0, 255, (128, 128, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((128, 128, 3), np.uint8), {}

    def step(self, action):
        return np.full((128, 128, 3), 7, np.uint8), 1.0, action == 0, action == 1, {}


@pytest.mark.parametrize("truncated", [False, True])
def test_a_large_observation_that_comes_alone_ends_as_the_environment_says(truncated):
    """D-13: INTERRUPTED is a truncation, TERMINATED is not. One large answer is not stacked with others."""
    with serve_gym(Picture) as server, closing(make_vec_remote([server.url], blocking=True)) as envs:
        envs.reset(seed=0)
        observations, rewards, terminations, truncations, _ = envs.step(np.array([int(truncated)]))
        assert (rewards[0], terminations[0], truncations[0]) == (1.0, not truncated, truncated)
        assert (observations[0] == 7).all()


def test_observations_of_slots_are_kept_from_later_steps_and_from_each_other() -> None:
    """Those that are handed out as parts of one array."""
    with serve_gym("CartPole-v1") as server, closing(make_vec_remote(server.url, num_envs=3)) as envs:
        first, _ = envs.reset(seed=1)
        while any(observation is None for observation in first):
            first = envs.step(envs.action_space.sample())[0]
        before = copy.deepcopy(first)
        first[1][:] = 7.0
        assert_identical(first[0], before[0])
        assert_identical(first[2], before[2])
        envs.step(envs.action_space.sample())
        assert_identical(first[0], before[0])
        np.testing.assert_array_equal(first[1], np.full(4, 7.0))


class Nothing(gymnasium.Env):
    """Observes nothing: its space is a dict without entries."""

    observation_space = spaces.Dict({})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {}, {}

    def step(self, action):
        return {}, 1.0, False, False, {}


def test_observations_without_parts_are_handed_out() -> None:
    """An observation for each slot, of a space that has no arrays too."""
    with serve_gym(Nothing) as server, closing(make_vec_remote(server.url, num_envs=2)) as envs:
        seen, _ = envs.reset(seed=1)
        while any(observation is None for observation in seen):
            seen = envs.step(envs.action_space.sample())[0]
        assert seen == ({}, {})
