"""Branches with seeds: whatever draws is seeded anew, wherever it lies, in single environments and in lanes."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.errors import RefusedError, SettingError
from tests.states.odd_generators import SEEDED, UNSAVED, ReplayedSequence
from tests.support import assert_identical, sampled, stable_id

DEADLINE = 60.0
STEPS = 12


def played(env: Any) -> list[Any]:
    return [np.array(env.step(1)[0]) for _ in range(STEPS)]


@pytest.mark.parametrize("kind", sampled(SEEDED, len(SEEDED), slow=9), ids=stable_id)
def test_a_generator_in_an_odd_place_is_seeded_anew_in_each_branch(kind: Any) -> None:
    with serve_gym(kind) as server, closing(make_remote(server.url, states=True, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        for _ in range(3):
            env.step(2)
        state = env.save_state()
        wanted = played(env)
        env.restore_state(state)
        assert_identical(played(env), wanted)
        found = {}
        for seed in (7, 8, 9):
            env.restore_state(state, seed=seed)
            found[seed] = played(env)
        assert len({np.stack(each).tobytes() for each in (*found.values(), wanted)}) == 4, "each draws for itself"
        with closing(
            make_vec_remote(server.url, num_envs=3, lanes=True, blocking=True, states=True, timeout=DEADLINE)
        ) as envs:
            envs.reset(seed=100)
            for number in range(5):
                envs.step(np.array([number % 3, 1, 2]))
            envs.restore_state(state, seed=7)
            rows = [envs.step(np.ones(3, np.int64))[0] for _ in range(STEPS)]
        for lane, seed in enumerate((7, 8, 9)):
            assert_identical([row[lane] for row in rows], found[seed])


@pytest.mark.parametrize("kind", sampled(UNSAVED, 2, slow=True), ids=stable_id)
def test_a_generator_that_cannot_be_reached_is_refused(kind: Any) -> None:
    with serve_gym(kind) as server, closing(make_remote(server.url, states=True, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        with pytest.raises(RefusedError, match="no state that can be copied"):
            env.save_state()
        env.step(0)


def test_what_cannot_be_seeded_anew_in_a_replay_is_restored_without_a_seed_alone() -> None:
    with serve_gym(ReplayedSequence) as server, closing(make_remote(server.url, states=True, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        env.step(2)
        state = env.save_state()
        wanted = played(env)
        with pytest.raises(RefusedError, match="sequence is a SeedSequence"):
            env.restore_state(state, seed=7)
        env.restore_state(state)
        assert_identical(played(env), wanted)


@pytest.mark.parametrize("seed", [1.5, True, "7", -1, [0.5, 1.5], [1], 2**64])
def test_what_is_no_seed_is_refused_and_the_environment_goes_on(seed: Any) -> None:
    with (
        serve_gym("CartPole-v1") as server,
        closing(make_vec_remote(server.url, num_envs=2, blocking=True, states=True, timeout=DEADLINE)) as envs,
    ):
        envs.reset(seed=0)
        state = envs.save_state(slots=[0])[0]
        with pytest.raises(SettingError, match="expected seed to be a number from 0 on, or one for each of 2 slots"):
            envs.restore_state(state, seed=seed)
        envs.step(np.zeros(2, np.int64))
