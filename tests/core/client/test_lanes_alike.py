"""Everything that takes slots gives the same by one world of lanes and by a world for each slot.

Each test runs one scenario with `lanes=True` and with `lanes=False`. The few things that differ are documented, and are
at the end.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import vector as wrappers

from bridge import Limits, Recording, errors, make_vec_remote, serve_gym
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from bridge.testing import EVERY_SPACE, CountingEnv, Proxy, SpaceEnv
from bridge.wrappers import BlockingReset
from tests.recording_reader import episodes_of, read_run
from tests.support import TAXI, assert_identical, sampled, until

SLOTS = 3
MODES = ("NextStep", "SameStep", "Disabled")
Scenario = Callable[[Any], Any]


def zeros(envs: Any) -> Any:
    return np.zeros(envs.num_envs, np.int64)


def in_both_forms(
    env: Any, scenario: Scenario, served: Mapping[str, Any] | None = None, wrap: Any = None, **keywords: Any
) -> Any:
    """Run a scenario with lanes and with worlds; what it returns has to be the same, bit for bit; return it."""
    found = []
    for lanes in (True, False):
        with serve_gym(env, **(served or {})) as server:
            envs = make_vec_remote(server.url, num_envs=SLOTS, lanes=lanes, **{"blocking": True, **keywords})
            worlds = [len(remote.slots) for remote in envs.remotes()]
            assert worlds == ([SLOTS] if lanes else [1] * SLOTS)
            wrapped = envs if wrap is None else wrap(envs)
            try:
                # What is told of the server has its port.
                found.append(told(scenario(wrapped), server.url))
            finally:
                wrapped.close()
    assert_identical(*found)
    return found[0]


def told(value: Any, url: str) -> Any:
    """A result with URL in the place of a server's."""
    if isinstance(value, str):
        return value.replace(url, "URL")
    if isinstance(value, dict):
        return {told(key, url): told(item, url) for key, item in value.items()}
    if type(value) in (list, tuple):  # a GraphInstance is a tuple too
        return type(value)(told(item, url) for item in value)
    return value


def refused(call: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[type, str]:
    """The error that a call raises, and the first line of what it says."""
    try:
        call(*args, **keywords)
    except Exception as error:
        return type(error), str(error).partition("\n")[0]
    raise AssertionError(f"{call} was not refused")


def play(envs: Any, steps: int = 60, seed: Any = 5) -> list[Any]:
    """What a reset and random steps return; ended slots are reset where the mode says that the loop does it."""
    disabled = envs.metadata["autoreset_mode"].value == "Disabled"
    envs.action_space.seed(1)
    results: list[Any] = [envs.reset(seed=seed)]
    for _ in range(steps):
        results.append(envs.step(envs.action_space.sample()))
        ended = results[-1][2] | results[-1][3]
        if disabled and ended.any():
            results.append(envs.reset(options={"reset_mask": ended}))
    return results


# Steps and resets


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", TAXI, "Blackjack-v1", "Pendulum-v1"])
def test_episodes_are_the_same_in_each_mode(env_id: str, mode: str) -> None:
    in_both_forms(env_id, play, autoreset_mode=mode)


@pytest.mark.parametrize("name", sampled(EVERY_SPACE, 8, slow=4))
def test_every_space_of_observations_and_actions_is_the_same(name: str) -> None:
    def factory() -> Any:
        return SpaceEnv(EVERY_SPACE[name](), EVERY_SPACE[name](), min_steps=2, max_steps=5)

    in_both_forms(factory, lambda envs: play(envs, 12))


@pytest.mark.parametrize("name", ["text", "graph", "sequence_of_dict", "one_of", "box_float32"])
def test_actions_with_a_part_that_has_none_are_the_same(name: str) -> None:
    """Gymnasium's own lanes take no action of a Dict or Tuple without parts."""

    def factory() -> Any:
        action = {"empty": spaces.Dict({}), "full": EVERY_SPACE[name](), "both": spaces.Tuple((spaces.Tuple(()),))}
        return SpaceEnv(spaces.Discrete(3), spaces.Dict(action), min_steps=2, max_steps=5)

    in_both_forms(factory, lambda envs: play(envs, 12))


@pytest.mark.parametrize("mode", MODES)
def test_masks_seeds_and_options_of_a_reset_are_the_same(mode: str) -> None:
    def scenario(envs: Any) -> list[Any]:
        left, middle = np.array([True, False, True]), np.array([False, True, False])
        ones = np.ones(SLOTS, np.int64)
        return [
            envs.reset(seed=1),
            envs.step(ones),
            envs.reset(options={"reset_mask": left}),
            envs.step(ones),
            envs.reset(seed=[7, 4, 9], options={"reset_mask": middle, "low": -0.01, "high": 0.01}),
            envs.step(ones),
            envs.reset(seed=[3, 3, 5], options={"low": -0.2, "high": 0.2}),
            envs.step(ones),
        ]

    in_both_forms("CartPole-v1", scenario, autoreset_mode=mode)


def test_seeds_are_the_same_and_so_is_what_is_wrong_with_one() -> None:
    def scenario(envs: Any) -> list[Any]:
        found: list[Any] = [refused(envs.step, zeros(envs))]  # before the first reset
        for seed in (11, [1, 2, 3], 2**70):
            found += [envs.reset(seed=seed), envs.unwrapped.np_random_seed]
            found.append([generator.random() for generator in envs.unwrapped.np_random])
        found += [refused(envs.reset, seed=wrong) for wrong in (-1, [1, 2], 1.5)]
        envs.reset(seed=[None, None, 4])
        return [*found, envs.unwrapped.np_random_seed[2]]

    in_both_forms("CartPole-v1", scenario)


def test_actions_are_checked_the_same_and_a_wrong_one_changes_nothing() -> None:
    def scenario(envs: Any) -> list[Any]:
        envs.reset(seed=0)
        wrong = [np.array([0, 1, 7]), np.array([0, 1]), np.array([0.0, 1.0, 1.0]), "no"]
        return [*[refused(envs.step, action) for action in wrong], envs.step([0, 1, 1]), envs.step(zeros(envs))]

    in_both_forms("CartPole-v1", scenario)


def test_asynchronous_calls_are_the_same() -> None:
    def scenario(envs: Any) -> list[Any]:
        found = [refused(envs.step_wait)]
        envs.reset_async(seed=2)
        found += [refused(envs.step_async, zeros(envs)), envs.reset_wait()]
        envs.step_async(zeros(envs))
        found += [refused(envs.call, "has_wrapper_attr", "gravity"), envs.step_wait()]
        envs.call_async("has_wrapper_attr", "gravity")
        return [*found, envs.call_wait(), envs.step(zeros(envs))]

    in_both_forms("CartPole-v1", scenario)


def test_send_and_recv_of_all_slots_are_the_same() -> None:
    def scenario(envs: Any) -> list[Any]:
        found: list[Any] = [envs.reset(seed=2)]
        for _ in range(30):
            envs.send(zeros(envs))
            found.append(envs.recv(at_least=SLOTS))
        envs.send(zeros(envs), [0, 1, 2])
        found.append(envs.recv(at_least=SLOTS))
        return [*found, refused(envs.recv, at_least=1), envs.step(zeros(envs))]

    in_both_forms("CartPole-v1", scenario)


def test_without_a_batch_the_slots_are_the_same() -> None:
    """Only when each slot begins is another: that of a world of its own waits for nobody."""

    def scenario(envs: Any) -> list[Any]:
        envs.reset(seed=2)
        until(lambda: all(own is not None for own in envs.step(zeros(envs))[0]))
        observations, rewards, terminations, truncations, infos = envs.step(zeros(envs))
        assert all(own.dtype == np.int64 and own[0] == 1 for own in observations)
        return [rewards.dtype.str, rewards.shape, terminations, truncations, infos["slot_state"], len(infos["n"])]

    in_both_forms(lambda: CountingEnv(1_000_000), scenario, blocking=False)


# What is known of the environments


@pytest.mark.parametrize("keywords", [{}, {"render_mode": "rgb_array"}, {"env_kwargs": {"max_episode_steps": 5}}])
def test_spaces_metadata_spec_and_versions_are_the_same(keywords: dict[str, Any]) -> None:
    def scenario(envs: Any) -> dict[str, Any]:
        spec = envs.spec
        del spec.kwargs["lanes"]
        single = [envs.single_observation_space, envs.single_action_space]
        return {
            "spaces": [str(space) for space in (envs.observation_space, envs.action_space, *single)],
            "metadata": {**envs.metadata, "autoreset_mode": envs.metadata["autoreset_mode"].value},
            "render_mode": envs.render_mode,
            "spec": spec.to_json(),
            "versions": envs.env.server_versions,
            "urls": envs.env.urls,
            "wrappers": envs.env.wrapper_classes(),
            "timeout": envs.timeout,
            "fps": envs.env.fps,
            "played": play(envs, 12),
        }

    in_both_forms("CartPole-v1", scenario, **keywords)


def test_attributes_and_calls_are_the_same() -> None:
    def scenario(envs: Any) -> list[Any]:
        envs.reset(seed=1)
        found: list[Any] = [envs.get_attr("gravity"), envs.call("has_wrapper_attr", "gravity")]
        envs.set_attr("gravity", [1.0, 2.0, 3.0])
        found.append(envs.get_attr("gravity"))
        envs.set_attr("gravity", 7.5)
        found.append(envs.step(zeros(envs)))
        envs.env.set_attr_at([1], "gravity", 3.0)
        found += [envs.get_attr("gravity"), envs.env.call_at([2, 0], "has_wrapper_attr", "x")]
        found += [str(space) for space in envs.get_attr("observation_space")]
        found += [
            refused(envs.get_attr, "nothing"),
            refused(envs.call, "nothing"),
            refused(envs.set_attr, "_private", 1),
            refused(envs.set_attr, "gravity", [1.0, 2.0]),
            refused(envs.env.call_at, [SLOTS], "reset"),
            refused(envs.call, "step", 17),
        ]
        return [*found, envs.step(zeros(envs))]

    in_both_forms("CartPole-v1", scenario)


def test_frames_are_the_same() -> None:
    def scenario(envs: Any) -> list[Any]:
        envs.reset(seed=1)
        found = [envs.render(), envs.call("render")]
        envs.step(zeros(envs))
        return [*found, envs.render()]

    frames = in_both_forms("CartPole-v1", scenario, render_mode="rgb_array")
    assert frames[0][0].shape == (400, 600, 3)
    assert in_both_forms(CountingEnv, lambda envs: [envs.reset(seed=1), refused(envs.render)])


WRAPPERS = {
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "NormalizeObservation": wrappers.NormalizeObservation,
    "NormalizeReward": wrappers.NormalizeReward,
    "ClipReward": lambda envs: wrappers.ClipReward(envs, 0.0, 0.5),
    "FlattenObservation": wrappers.FlattenObservation,
    "RescaleObservation": lambda envs: wrappers.TransformObservation(envs, lambda value: value / 2),
    "DictInfoToList": wrappers.DictInfoToList,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_gymnasium_s_vector_wrappers_give_the_same(name: str) -> None:
    def scenario(envs: Any) -> list[Any]:
        played = play(envs)
        for result in played:
            infos = result[-1]
            # Seconds of the clock.
            for info in infos if isinstance(infos, list) else [infos]:
                info.get("episode", {}).pop("t", None)
        return played

    in_both_forms("CartPole-v1", scenario, wrap=WRAPPERS[name])


# Copies


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda envs: pickle.loads(pickle.dumps(envs))])
def test_copies_are_of_the_same_form_and_play_the_same(copied: Callable[[Any], Any]) -> None:
    def scenario(envs: Any) -> list[Any]:
        before = play(envs, 5)
        other = copied(envs.env)
        again = BlockingReset(other)
        played = play(again, 5)
        assert [remote.slots for remote in again.remotes()] == [remote.slots for remote in envs.remotes()]
        again.close()
        return [before, played, envs.step(zeros(envs))]

    before, played, _ = in_both_forms("CartPole-v1", scenario)
    assert_identical(played, before)


def test_what_a_spec_makes_is_of_the_same_form_and_plays_the_same() -> None:
    def scenario(envs: Any) -> list[Any]:
        again: Any = gymnasium.make_vec(envs.spec)
        played = play(again)
        assert [remote.slots for remote in again.remotes()] == [remote.slots for remote in envs.remotes()]
        again.close()
        return [play(envs), played]

    one, other = in_both_forms("CartPole-v1", scenario, autoreset_mode="SameStep")
    assert_identical(one, other)


# Failures


class Failing(CountingEnv):
    """The one that was seeded with 6 raises in the second step of its second episode."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.seeded = seed
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if (self.seeded, self.episode, self.steps) == (6, 2, 2):
            raise RuntimeError("on purpose")
        return result


@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_raises_ends_the_same_episode_alone(mode: str) -> None:
    def scenario(envs: Any) -> list[Any]:
        played = play(envs, 20)
        for result in played:
            infos = result[-1]
            for own in (infos, infos.get("final_info", {})):
                if "error" in own:  # the traceback, and who says it, are another
                    own["error"] = [text and "on purpose" in text for text in own["error"]]
        return [played, envs.report()["episodes_cut"]]

    played, cut = in_both_forms(Failing, scenario, autoreset_mode=mode)
    assert cut == 1.0
    assert [result[3].tolist() for result in played if len(result) == 5 and result[3].any()] == [[False, True, False]]


def test_an_environment_that_does_nothing_but_fail_is_told_the_same() -> None:
    class Hopeless(CountingEnv):
        def step(self, action: Any) -> Any:
            raise RuntimeError("never works")

    def scenario(envs: Any) -> Any:
        envs.reset(seed=0)
        return refused(lambda: [envs.step(zeros(envs)) for _ in range(20)])

    kind, text = in_both_forms(Hopeless, scenario, max_failures=3)
    assert kind is errors.EnvironmentFailedError
    assert "the last 3 episodes of slot 0 ended by failures of the environment" in text


@pytest.mark.parametrize("where", ["constructor", "reset"])
def test_one_that_cannot_begin_is_told_the_same(where: str) -> None:
    class Broken(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            if where == "constructor":
                raise RuntimeError("no display")

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            raise RuntimeError("no display")

    for lanes in (True, False):
        with serve_gym(Broken) as server, pytest.raises(errors.EnvironmentFailedError, match="no display"):
            make_vec_remote(server.url, num_envs=SLOTS, blocking=True, lanes=lanes, max_failures=3).reset(seed=0)


@pytest.mark.parametrize("on_lost", ["wait", "continue"])
def test_a_lost_connection_truncates_every_slot_once_and_each_comes_back(on_lost: str) -> None:
    found = []
    for lanes in (True, False):
        with serve_gym(lambda: CountingEnv(1_000)) as server, Proxy(server.port) as proxy:
            url = f"grpc://127.0.0.1:{proxy.port}"
            keywords: dict[str, Any] = {"lanes": lanes, "on_lost": on_lost}
            envs: Any = make_vec_remote(url, num_envs=SLOTS, blocking=True, **keywords)
            envs.reset(seed=0)
            told_now = [envs.step(zeros(envs))[:4]]
            proxy.cut()
            *lost, infos = envs.step(zeros(envs))
            told_now += [lost, infos["_error"], list(infos)]
            until(lambda envs=envs: envs.step(zeros(envs))[0][:, 0].tolist() == [1] * SLOTS and all_run(envs))
            told_now.append(envs.step(zeros(envs))[2:4])
            report = envs.report()
            told_now.append([report[name] for name in ("slots/running", "episodes_cut", "episodes_moved", "moves")])
            told_now.append([sum(len(remote.slots) for remote in envs.remotes() if remote.returns == 1)])
            found.append(told_now)
            envs.close()
    assert_identical(*found)


def all_run(envs: Any) -> bool:
    return bool(envs.report()["slots/running"] == SLOTS)


def test_who_wants_a_loss_raised_is_told_the_same() -> None:
    for lanes in (True, False):
        with serve_gym(CountingEnv) as server, Proxy(server.port) as proxy:
            url = f"grpc://127.0.0.1:{proxy.port}"
            envs: Any = make_vec_remote(url, num_envs=SLOTS, blocking=True, lanes=lanes, on_lost="raise")
            envs.reset(seed=0)
            envs.step(zeros(envs))
            proxy.cut()
            with pytest.raises(errors.ConnectionLostError):
                envs.step(zeros(envs))
            envs.close()


# Servers that drain and stop


def test_a_server_that_drains_serves_both_to_its_end() -> None:
    for lanes in (True, False):
        with serve_gym(lambda: CountingEnv(3), limits=Limits(drain_timeout=30.0)) as server:
            envs = make_vec_remote(server.url, num_envs=SLOTS, blocking=True, lanes=lanes)
            envs.reset(seed=0)
            envs.step(zeros(envs))
            server.drain()
            # There is no other server: the slots stay, and begin further episodes.
            steps = [envs.step(zeros(envs)) for _ in range(6)]
            assert [step[0].tolist()[0] for step in steps] == [[1, 2], [1, 3], [2, 0], [2, 1], [2, 2], [2, 3]]
            assert not any(step[3].any() or "error" in step[4] for step in steps)
            with pytest.raises(errors.ConnectError, match="stopping and takes no new worlds"):
                make_vec_remote(server.url, num_envs=SLOTS, blocking=True, lanes=lanes)
            envs.close()  # with the last client it ends


def test_a_server_that_stops_truncates_every_slot_and_closes_every_environment() -> None:
    for lanes in (True, False):
        made: list[CountingEnv] = []
        server = serve_gym(lambda made=made: made.append(CountingEnv()) or made[-1])
        envs = make_vec_remote(server.url, num_envs=SLOTS, blocking=True, lanes=lanes, blocking_timeout=1.0)
        envs.reset(seed=0)
        envs.step(zeros(envs))
        server.stop()
        observations, rewards, _, truncations, infos = envs.step(zeros(envs))
        assert observations.tolist() == [[1, 1]] * SLOTS
        assert (rewards.tolist(), truncations.tolist()) == ([0.0] * SLOTS, [True] * SLOTS)
        assert infos["error"].all()
        with pytest.raises(errors.RemoteTimeoutError):
            envs.step(zeros(envs))
        assert (len(made), [env.closed for env in made]) == (SLOTS, [True] * SLOTS)
        envs.close()
        envs.close()


def test_who_closes_leaves_no_world_in_either_form() -> None:
    for lanes in (True, False):
        with serve_gym(CountingEnv) as server:
            envs = make_vec_remote(server.url, num_envs=SLOTS, blocking=True, lanes=lanes)
            envs.reset(seed=0)
            envs.close()
            until(lambda server=server: server.worlds == [] and server.connections == 0)
            with pytest.raises(errors.ClosedError):
                envs.step(zeros(envs))


# Recordings


def test_recordings_have_the_same_episodes_and_replay(tmp_path: Path) -> None:
    recorded = []
    for lanes in (True, False):
        folder = tmp_path / str(lanes)
        with serve_gym("CartPole-v1", record=Recording(folder, observations=True, infos=True)) as server:
            envs = make_vec_remote(server.url, num_envs=SLOTS, blocking=True, lanes=lanes)
            play(envs, 60)
            envs.close()
        streams = read_run(folder)
        assert len(streams) == (1 if lanes else SLOTS)
        found = []
        for header, rows in streams.values():
            assert header["env_id"] == "CartPole-v1"
            for lane in range(SLOTS if lanes else 1):
                for episode in episodes_of(rows, lane):
                    names = ("kind", "action", "reward", "terminated", "truncated", "hash", "seed")
                    found.append([{name: row[name] for name in names if name in row} for row in episode])
        recorded.append(sorted(found, key=repr))
        # Each episode that followed a seed is proven.
        proofs = [verify(episode) for episode in read_folder(folder).episodes()]
        assert len(proofs) == len(found)
        assert all(proof.ok for proof in proofs)
    assert_identical(*recorded)


# What differs, as docs/trainers.md says


def test_only_worlds_are_stepped_and_reset_each_by_itself() -> None:
    with serve_gym(CountingEnv) as server:
        envs: Any = make_vec_remote(server.url, num_envs=SLOTS, blocking=True)
        assert len(envs.remotes()) == 1
        envs.reset(seed=0)
        with pytest.raises(errors.SettingError, match=r"name all of them.*or give make_vec_remote lanes=False"):
            envs.send(np.zeros(1, np.int64), [0])
        with pytest.raises(errors.SettingError, match=r"same options for all 3 lanes.*lanes=False for options of each"):
            envs.reset_async(slot_options=[{"low": 0.0}, {}, {}])
        envs.close()
        envs = make_vec_remote(server.url, num_envs=SLOTS, blocking=True, lanes=False)
        envs.reset_async(slot_options=[{"low": 0.0}, {}, {}])
        envs.reset_wait()
        envs.send(np.zeros(1, np.int64), [0])
        assert envs.recv()[0].tolist() == [0]
        envs.close()


def test_there_is_a_remote_for_each_world() -> None:
    found = []
    for lanes in (True, False):
        with serve_gym(CountingEnv) as server:
            envs: Any = make_vec_remote(server.url, num_envs=SLOTS, blocking=True, lanes=lanes)
            play(envs, 4)
            remotes = envs.remotes()
            found.append([[remote.slots for remote in remotes], sum(remote.steps_received for remote in remotes)])
            envs.close()
    assert found == [[[(0, 1, 2)], 12], [[(0,), (1,), (2,)], 12]]


@pytest.mark.slow
def test_a_world_that_crashes_ends_the_episodes_of_all_its_lanes() -> None:
    for lanes, ended in ((True, [True] * 3), (False, [False, True, False])):
        with serve_gym(Crashing, isolation="process") as server:
            envs: Any = make_vec_remote(server.url, num_envs=SLOTS, blocking=True, lanes=lanes)
            envs.reset(seed=5)
            envs.step(zeros(envs))
            assert envs.step(zeros(envs))[3].tolist() == ended
            envs.close()


class Crashing(CountingEnv):
    """The one that was seeded with 6 ends its process in its second step."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeded = seed
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if (self.seeded, self.episode, self.steps) == (6, 1, 2):
            os._exit(1)
        return result
