"""The recorder on the client: the same files, whatever wraps the remote environments."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import VectorWrapper

from bridge import RealTime, Recorder, make_vec_remote, serve_gym
from bridge.errors import InvalidActionError, RecordingError, RemoteTimeoutError, SettingError
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from bridge.testing import CountingEnv, VirtualClock
from bridge.wrappers import BlockingReset
from tests.preloaded import run
from tests.recording_reader import read_run
from tests.support import play_vector, until


def test_slots_of_a_bare_remote_are_recorded_and_verified(tmp_path):
    with serve_gym("CartPole-v1") as server:
        envs = Recorder(make_vec_remote(server.url, num_envs=2), tmp_path, player="agent:PPO")
        play_vector(envs, 150, seed=5)
    found = read_folder(tmp_path)
    assert [stream.header["recorded_by"] for stream in found.streams] == ["client", "client"]
    episodes = found.episodes()
    assert len(episodes) >= 4
    assert {episode.seed for episode in episodes} >= {5, 6}
    for episode in episodes:
        done = verify(episode)
        assert done.ok, str(done)
        assert episode.players in (["agent:PPO"], [])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_blocking_reset_is_recorded_in_each_of_its_modes(tmp_path, mode):
    with serve_gym("CartPole-v1", num_envs=2) as server:
        envs = Recorder(BlockingReset(make_vec_remote(server.url), autoreset_mode=mode), tmp_path, observations=True)
        envs.action_space.seed(1)
        observations, _ = envs.reset(seed=5)
        rewards = 0.0
        first = [observation.copy() for observation in observations]
        for _ in range(60):
            _, reward, terminations, truncations, _ = envs.step(envs.action_space.sample())
            rewards += reward.sum()
            if mode == "Disabled" and (ended := terminations | truncations).any():
                envs.reset(options={"reset_mask": ended})
        envs.close()
    episodes = read_folder(tmp_path).episodes()
    assert sum(episode.total for episode in episodes) == rewards
    for episode in episodes:
        done = verify(episode)
        assert done.ok, str(done)
    for number, (_, rows) in read_run(tmp_path).items():
        assert np.array(rows[0]["observation"], np.float32).tobytes() == first[number - 1].tobytes()


class Objectives(CountingEnv):
    """Its reward is the action, twice."""

    reward_space = spaces.Box(-2, 2, (2,), np.float64)

    def __init__(self):
        super().__init__(action_space=spaces.Box(-2, 2, (1,), np.float32))

    def step(self, action):
        observation, _, *told = super().step(action)
        return observation, np.repeat(np.float64(action), 2), *told


@pytest.mark.parametrize("apart", [False, True])
def test_what_the_trainer_writes_over_is_recorded_as_it_was(tmp_path, apart):
    """A trainer may use one array for the actions of all steps, and scale rewards in their place."""
    with serve_gym(Objectives) as server:
        envs = Recorder(BlockingReset(make_vec_remote(server.url, num_envs=2)), tmp_path, observations=True)
        options = {"level": np.array([1, 2])}
        observations, _ = envs.reset(seed=1, options=options)
        options["level"][:] = 0
        actions, expected = np.zeros((2, 1), np.float32), [0.25, 0.5, 0.75, 1.0]
        for value in expected:
            observations[:] = 100
            actions[:] = value
            if apart:
                envs.step_async(actions)
                actions[:] = 2.0
                observations, rewards, *_ = envs.step_wait()
            else:
                observations, rewards, *_ = envs.step(actions)
            rewards[:] = -1.0
        envs.close()
    found = read_folder(tmp_path)
    for stream in found.streams:
        (episode,) = stream.episodes()
        steps = episode.own[1:]
        assert np.ravel(stream.samples("action", steps)).tolist() == expected
        assert episode.rewards.tolist() == [[value, value] for value in expected]
        assert [step for _, step in stream.samples("observation", episode.own)] == [0, 1, 2, 3, 4]
        assert stream.resets[0].options["level"].tolist() == [1, 2]


def test_a_recording_of_real_time_by_a_client_is_no_proof_and_says_so(tmp_path):
    clock = VirtualClock()
    with serve_gym("CartPole-v1", fps=10, realtime=RealTime(clock=clock)) as server:
        envs = Recorder(BlockingReset(make_vec_remote(server.url)), tmp_path)
        envs.reset(seed=5)
        clock.advance(0.3)
        envs.step(np.array([1]))
        envs.close()
    (episode,) = read_folder(tmp_path).episodes()
    with pytest.raises(RecordingError, match="a client recorded it in real time"):
        verify(episode)


def test_an_environment_that_is_not_remote_is_refused(tmp_path):
    envs = gymnasium.make_vec("CartPole-v1", num_envs=1)
    with pytest.raises(SettingError, match="expected what make_vec_remote returns"):
        Recorder(envs, tmp_path)
    envs.close()


def test_send_is_refused_by_name(tmp_path):
    with serve_gym("CartPole-v1") as server:
        envs = Recorder(make_vec_remote(server.url), tmp_path)
        with pytest.raises(SettingError, match="have the server record"):
            envs.send(np.array([0]))
        envs.close()


class Interrupted(VectorWrapper):
    """Its fourth step raises once it was made: its results are lost, or come by another `step_wait`."""

    steps = 0

    def __init__(self, env, error):
        super().__init__(env)
        self.error = error

    def step(self, actions):
        self.steps += 1
        if self.steps == 4:
            self.env.step_async(actions)
            if isinstance(self.error, KeyboardInterrupt):
                self.env.step_wait()
            raise self.error
        return self.env.step(actions)

    def step_wait(self):
        return self.env.step_wait()


def counted(folder, error, *, retried):
    """Record a step that is refused, and five of which the third raises; return the episode, and its actions."""
    with serve_gym(CountingEnv) as server:
        envs = Recorder(Interrupted(BlockingReset(make_vec_remote(server.url)), error), folder, observations=True)
        envs.reset(seed=1)
        with pytest.raises(InvalidActionError):
            envs.step(np.array([7]))
        for step in range(5):
            if step == 2:
                with pytest.raises(type(error)):
                    envs.step(np.array([1]))
                if retried:
                    envs.step_wait()
            else:
                envs.step(np.array([step % 2]))
        envs.close()
    (stream,) = read_folder(folder).streams
    episode = stream.episodes()[0]
    return episode, stream.samples("action", episode.own[1:])


def test_a_step_whose_results_are_lost_is_a_gap_and_one_that_was_refused_is_none(tmp_path):
    episode, actions = counted(tmp_path, KeyboardInterrupt(), retried=False)
    assert actions == [0, 1], "which episode later steps are of is not known"
    assert (episode.incomplete, episode.end) == (True, "lost")


def test_results_that_come_by_another_step_wait_are_those_of_the_actions_that_were_sent(tmp_path):
    episode, actions = counted(tmp_path, RemoteTimeoutError("grpc://a", "late"), retried=True)
    assert actions == [0, 1, 1, 1, 0]
    assert (episode.incomplete, episode.end) == (False, "terminated")


def test_a_program_that_ends_without_close_leaves_what_was_recorded(tmp_path):
    code = (
        "import sys, numpy as np; from bridge import Recorder, make_vec_remote; from bridge.wrappers import "
        "BlockingReset; envs = Recorder(BlockingReset(make_vec_remote(sys.argv[1])), sys.argv[2]); envs.reset(seed=1); "
        "[envs.step(np.array([0])) for _ in range(3)]; sys.exit('on purpose')"
    )
    with serve_gym(CountingEnv) as server:
        done = run("-W", "ignore", "-c", code, server.url, tmp_path)
    assert "on purpose" in done.stderr
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".parquet", ".sums"]
    assert [episode.length for episode in read_folder(tmp_path).episodes()] == [3]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_slot_that_goes_on_with_its_last_observation_is_recorded_from_its_return_on(tmp_path, mode):
    with serve_gym(lambda: CountingEnv(1000)) as stays:
        lost = serve_gym(lambda: CountingEnv(1000))
        remote = make_vec_remote([stays.url, lost.url])
        envs = Recorder(BlockingReset(remote, on_lost="continue", autoreset_mode=mode), tmp_path, observations=True)
        envs.reset(seed=1)
        infos = [envs.step(np.zeros(2, np.int64))[4] for _ in range(3)]
        lost.stop()
        infos += [envs.step(np.zeros(2, np.int64))[4] for _ in range(3)]
        assert [info["valid"].tolist() for info in infos] == [[True, True]] * 3 + [[True, False]] * 3
        with serve_gym(lambda: CountingEnv(1000), port=int(lost.url.rpartition(":")[2])):
            until(lambda: envs.step(np.zeros(2, np.int64))[4]["valid"].all())
            envs.step(np.zeros(2, np.int64))
            envs.close()
    kept, renewed = (stream.episodes() for stream in read_folder(tmp_path).streams)
    assert [episode.incomplete for episode in (*kept, *renewed)] == [False] * 3
    assert [episode.end for episode in renewed] == ["failed", "closed"]
    seen = [[step for _, step in one.stream.samples("observation", one.own)] for one in renewed]
    assert seen == [[0, 1, 2, 3], [0, 1, 2]]


class Deviates(CountingEnv):
    """Its info has an entry of the name that a lost slot's has."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def step(self, action):
        *results, _ = super().step(action)
        return *results, {"error": self.error}


@pytest.mark.parametrize("error", [0.5, {"x": 0.5}, "far"])
def test_an_info_named_error_is_no_failure(tmp_path, error):
    with serve_gym(lambda: Deviates(error)) as server:
        envs = Recorder(BlockingReset(make_vec_remote(server.url, num_envs=2)), tmp_path)
        envs.reset(seed=1)
        for _ in range(7):
            envs.step(np.zeros(2, np.int64))
        envs.close()
    for episode in read_folder(tmp_path).episodes():
        assert (episode.length, episode.end) == ((5, "terminated") if episode.number == 1 else (1, "closed"))
