"""`exchange(wait=True)`: the program waits until its agent has acted, as an environment is stepped."""

from __future__ import annotations

import numpy as np
import pytest

from bridge import make_remote, make_vec_remote
from bridge.errors import Code, RefusedError
from bridge.testing import check_server
from tests.game.loops import walking
from tests.support import until


def test_each_step_is_one_call_and_each_reset_one_round(process):
    with walking(True, process=process, length=4) as walk:
        env = make_remote(walk.game.url)
        for seed in (3, 4):
            np.testing.assert_array_equal(env.reset(seed=seed, options={"of": seed})[0], [0, 0])
            told = [env.step(2) for _ in range(4)]
            assert [float(seen[0]) for seen, *_ in told] == [1, 2, 3, 4]
            assert [reward for _, reward, *_ in told] == [2, 2, 2, 2]
            assert [ends for _, _, ends, *_ in told] == [False, False, False, True]
        env.close()
    assert walk.begun == [(3, {"of": 3}), (4, {"of": 4})]
    assert walk.taken == [None, 2, 2, 2, 2, None, 2, 2, 2, 2]


def test_a_reset_in_the_midst_of_a_round_ends_it(process):
    with walking(True, process=process) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=1)
        env.step(1)
        np.testing.assert_array_equal(env.reset(seed=2)[0], [0, 0])
        env.reset()
        env.step(1)
        env.close()
    assert [seed for seed, _ in walk.begun] == [1, 2, None]


def test_a_program_waits_for_somebody_before_the_first_round(process):
    with walking(True, process=process, timeout=0.05) as walk:
        until(lambda: walk.game.server.status()["connections"] == 0)
        assert walk.taken == []
        env = make_remote(walk.game.url)
        env.reset(seed=8)
        assert walk.begun == [(8, None)]
        env.close()


def test_after_its_timeout_it_goes_on_with_the_default_and_the_agent_is_told_what_it_missed(process):
    with walking(True, process=process, timeout=0.02, default_action=3) as walk:
        env = make_remote(walk.game.url)
        # On a slow machine this may be a later frame of the round than its first.
        first, _ = env.reset()
        until(lambda: len(walk.taken) > 5)
        seen, reward, *_ = env.step(1)
        assert reward == seen[1] - first[1], "the rewards of the frames without it are in the sum"
        assert seen[0] > 3
        env.close()


def test_a_round_that_ended_without_the_agent_is_told_by_its_next_step(process):
    with walking(True, process=process, length=3, timeout=0.02) as walk:
        env = make_remote(walk.game.url)
        env.reset()
        until(lambda: len(walk.begun) > 1)
        seen, _, ends, *_ = env.step(1)
        assert ends
        assert seen[0] == 3
        np.testing.assert_array_equal(env.reset()[0], [0, 0])
        env.close()


def test_the_next_agent_begins_a_round_of_its_own(process):
    with walking(True, process=process, timeout=0.02) as walk:
        for seed in (1, 2):
            env = make_remote(walk.game.url)
            env.reset(seed=seed)
            env.step(1)
            env.close()
        assert [seed for seed, _ in walk.begun if seed is not None] == [1, 2]


def test_a_further_client_is_refused_and_may_watch(process):
    with walking(True, process=process) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=1)
        with pytest.raises(RefusedError) as refused:
            make_remote(walk.game.url)
        assert refused.value.code == Code.RESOURCE_EXHAUSTED
        assert "watch, by the setting role=spectator" in str(refused.value)
        assert "create another" not in str(refused.value), "a game is there once"
        watcher = make_remote(walk.game.url + "?world=", role="spectator")
        watcher.reset(seed=5)
        env.step(1)
        watcher.step(0)
        assert walk.begun == [(1, None)]
        watcher.close()
        env.close()


def test_three_games_are_the_slots_of_a_vector(process):
    with (
        walking(True, length=6, process=process) as one,
        walking(True, length=6, process=process) as two,
        walking(True, length=6, process=process) as three,
    ):
        envs = make_vec_remote([walk.game.url for walk in (one, two, three)], blocking=True)
        seen, _ = envs.reset(seed=10)
        assert seen.shape == (3, 2)
        ends = 0
        for _ in range(20):
            *_, terminations, _, _ = envs.step(np.ones(3, np.int64))
            ends += int(terminations.sum())
        envs.close()
        assert [walk.begun[0] for walk in (one, two, three)] == [(10, None), (11, None), (12, None)]
    assert ends >= 6


def test_it_passes_what_a_lock_step_world_has_to(process):
    with walking(True, length=50, process=process, timeout=0.5) as walk:
        report = check_server(walk.game.url)
        assert report.ok, str(report)
