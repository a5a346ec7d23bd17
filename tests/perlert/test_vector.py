import contextlib
import os
import signal
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import SlotState
from bridge.errors import ClosedError, InvalidActionError, ResetNeededError, SettingError
from bridge.perlert import PerlertVectorEnv, serve_perlert
from tests.counting_envs import Counts
from tests.support import until


class Line:
    """A parallel world by its shape alone: two agents, the first one's episode is shorter."""

    possible_agents = ("a_0", "a_1")

    def observation_space(self, agent):
        return spaces.Box(0, 1000, (1,))

    def action_space(self, agent):
        return spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        self.agents, self.count = list(self.possible_agents), 0
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {}

    def step(self, actions):
        self.count += 1
        before = self.agents
        over = {agent: self.count >= (5 if agent == "a_0" else 12) for agent in before}
        self.agents = [agent for agent in before if not over[agent]]
        seen = {agent: np.full(1, self.count, np.float32) for agent in before}
        return seen, {agent: float(actions[agent]) for agent in before}, over, dict.fromkeys(before, False), {}

    def close(self):
        pass


@contextlib.contextmanager
def counting(fps, **timeouts):
    """Two slots of such environments that have begun, and what they saw last."""
    with (
        serve_perlert(Counts, instances=2, fps=fps) as server,
        contextlib.closing(PerlertVectorEnv(server.urls, **timeouts)) as envs,
    ):
        observations, _ = envs.reset()
        while any(seen is None for seen in observations):
            observations, *_ = envs.step(np.array([0, 0]))
        # The first step of a run also has the rewards of frames before the first observation that came.
        observations, *_ = envs.step(np.array([0, 0]))
        yield envs, observations


def test_agents_of_one_world_are_slots_of_one_vector_and_none_waits_for_anothers_reset():
    # P-29
    with serve_perlert(Line, name="line", fps=25) as server:
        envs = PerlertVectorEnv(server.url, agents=["a_0", "a_1"])
        observations, infos = envs.reset()
        for seen, state in zip(observations, infos["slot_state"].tolist(), strict=True):
            assert state == (SlotState.RESETTING if seen is None else SlotState.RUNNING)
        returns, current, alone = [[], []], np.zeros(2), 0
        for _ in range(400):
            observations, rewards, terminations, truncations, infos = envs.step(np.array([1, 2]))
            assert not truncations.any()
            assert [seen is not None for seen in observations] == infos["_step"].tolist() if "_step" in infos else True
            alone += observations[0] is None and observations[1] is not None
            current += rewards
            for slot in np.flatnonzero(terminations):
                returns[slot].append(float(current[slot]))
                current[slot] = 0
            if min(map(len, returns)) >= 3:
                break
        envs.close()
        with pytest.raises(ClosedError):
            envs.reset()
    assert alone >= 3
    # Until the first action comes, the default is 0: a process that stands still may miss all 5 frames of an episode.
    assert all(0 <= total <= 5.0 for total in returns[0])
    assert all(0 <= total <= 24.0 and total % 2 == 0 for total in returns[1])
    assert max(returns[0]) > 0
    assert max(returns[1]) > 0


def test_instances_of_one_server_are_a_vector():
    with serve_perlert("CartPole-v1", instances=3, fps=200, max_rate=200) as server:
        envs = PerlertVectorEnv(server.urls)
        assert isinstance(envs, gymnasium.vector.VectorEnv)
        assert envs.action_space.shape == (3,)
        envs.reset()
        episodes = 0
        for _ in range(1000):
            observations, _, terminations, _, _ = envs.step(envs.action_space.sample())
            for seen in observations:
                assert seen is None or envs.single_observation_space.shape == seen.shape
            episodes += int(terminations.sum())
            if episodes >= 4:
                break
        envs.close()
    assert episodes >= 4


def test_a_vector_used_out_of_turn_tells_what_to_do():
    with serve_perlert("CartPole-v1", instances=2, fps=100) as server:
        with pytest.raises(SettingError, match="as many agents as URLs"):
            PerlertVectorEnv(server.urls, agents=["agent0"])
        envs = PerlertVectorEnv(server.urls)
        with pytest.raises(ResetNeededError):
            envs.step(np.array([0, 1]))
        with pytest.raises(SettingError, match="reset_mask"):
            envs.reset(options={"other": 1})
        envs.reset()
        for _ in range(200):
            observations, *_ = envs.step(np.array([0, 1]))
            if observations[0] is not None:
                break
        with pytest.raises(InvalidActionError):
            envs.step(np.array([7, 7]))
        envs.close()


def test_slots_with_other_spaces_are_refused():
    with (
        serve_perlert({"cartpole": "CartPole-v1", "mountain": "MountainCar-v0"}, fps=100) as server,
        pytest.raises(SettingError, match="the same spaces"),
    ):
        PerlertVectorEnv(server.urls)


def test_a_server_that_is_gone_is_no_exception_for_the_vector():
    with serve_perlert("CartPole-v1", instances=1, fps=100) as lasting:
        going = serve_perlert("CartPole-v1", fps=100)
        envs = PerlertVectorEnv([lasting.url, going.url], timeout=2, start_timeout=2)
        envs.reset()
        going.stop()
        error = None
        alive = 0
        for _ in range(300):
            observations, _, _, _, infos = envs.step(np.array([0, 1]))
            alive += observations[0] is not None
            if "error" in infos:
                error = infos["error"][1]
            if error is not None and alive > 20:
                break
        envs.close()
    assert "within the deadline" in error
    assert alive > 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_leaves_the_slots_to_its_parent():
    with counting(50) as (envs, observations):
        for call in (envs.reset, lambda: envs.step(np.array([0, 0]))):
            child = os.fork()
            if child == 0:
                # Without an error it would wait for threads that are the parent's alone.
                signal.alarm(10)
                try:
                    call()
                except ClosedError:
                    os._exit(7)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        observations, *_ = envs.step(np.array([0, 0]))
        assert all(seen is not None for seen in observations)


@pytest.mark.parametrize("refused", [[0, 5], [0], [0, 0, 0]])
def test_a_refused_action_loses_no_reward_of_the_other_slots(refused):
    with counting(50) as (envs, observations):
        before = observations
        with pytest.raises(InvalidActionError):
            envs.step(np.array(refused))
        after, rewards, *_ = envs.step(np.array([0, 0]))
    assert [float(now[0] - then[0]) for now, then in zip(after, before, strict=True)] == rewards.tolist()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals that wake a thread")
def test_a_step_that_is_interrupted_is_returned_by_the_next_one_and_left_by_a_reset():
    with counting(4, start_timeout=0.5) as (envs, observations):

        def interrupt(sent):
            until(lambda: envs.envs[0].stats["sent"] > sent)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        def interrupted_step():
            thread = threading.Thread(target=interrupt, args=[envs.envs[0].stats["sent"]])
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                envs.step(np.array([1, 1]))
            thread.join()

        interrupted_step()
        after, rewards, *_ = envs.step(np.array([0, 0]))
        assert [float(now[0] - then[0]) for now, then in zip(after, observations, strict=True)] == rewards.tolist()
        interrupted_step()
        assert envs.reset()[1]["slot_state"].tolist() == [SlotState.RESETTING] * 2
