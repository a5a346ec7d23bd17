"""Environments saved, restored and forked from the other end of the wire: right, or refused."""

from __future__ import annotations

import pickle
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from bridge import Auth, MessageForm, SavedState, States, make_remote, make_vec_remote, serve_gym
from bridge.core.encoding.tensors import unpack_tensor
from bridge.errors import Code, RefusedError, SettingError
from bridge.testing import Inspector
from tests.odd_envs import BehindProxy, SetOfCells
from tests.states_envs import REFUSED, Walk, wrapped
from tests.support import assert_identical, sampled, stable_id

DEADLINE = 60.0
STEPS = 100


def timeless(result: Any) -> Any:
    """A result without the time that an episode took."""
    *rest, info = result
    if "episode" in info:
        info = {**info, "episode": {key: value for key, value in info["episode"].items() if key != "t"}}
    return (*rest, info)


def played(env: Any, actions: list[Any]) -> list[Any]:
    """What an environment gives for actions, across the ends of episodes."""
    found = []
    for action in actions:
        found.append(timeless(env.step(action)))
        if found[-1][2] or found[-1][3]:
            found.append(timeless(env.reset()))
    return found


@pytest.mark.parametrize("kind", sampled(REFUSED, 8, slow=2), ids=stable_id)
def test_a_kind_that_cannot_be_copied_is_refused_and_its_client_goes_on(kind: Any) -> None:
    with serve_gym(kind) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        with pytest.raises(RefusedError, match="no state that can be copied") as refused:
            env.save_state()
        assert refused.value.code == Code.FAILED_PRECONDITION
        env.step(0)


KINDS = ["CartPole-v1", "FrozenLake-v1", wrapped, Walk, SetOfCells, BehindProxy]


@pytest.mark.parametrize(
    ("kind", "isolation"),
    [*sampled([(kind, None) for kind in KINDS], 3, slow=True), *sampled([(kind, "process") for kind in KINDS], 6, 3)],
    ids=stable_id,
)
def test_a_remote_environment_goes_on_from_its_state(kind: Any, isolation: Any) -> None:
    with serve_gym(kind, isolation=isolation) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=3)
        env.action_space.seed(1)
        observation, *_, info = env.step(env.action_space.sample())
        state = env.save_state()
        assert state.how == "copy"
        assert state.bytes > 0
        assert state.identifier not in repr(state)
        actions = [env.action_space.sample() for _ in range(STEPS)]
        wanted = played(env, actions)
        for _ in range(2):
            again, told = env.restore_state(state)
            assert_identical(again, observation)
            assert_identical(timeless((told,))[0], timeless((info,))[0])
            assert_identical(played(env, actions), wanted)


def test_a_state_one_step_before_the_end_ends_again() -> None:
    with serve_gym("CartPole-v1") as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        states, ended = [env.save_state()], False
        while not ended:
            _, _, ended, _, _ = env.step(1)
            if not ended:
                states.append(env.save_state())
        with pytest.raises(RefusedError, match="no episode runs"):
            env.save_state()
        # Of an episode that has ended, too: it runs again.
        env.restore_state(states[-1])
        assert env.step(1)[2]
        env.restore_state(states[0])
        assert not env.step(1)[2]


@pytest.mark.parametrize("isolation", [None, pytest.param("process", marks=pytest.mark.slow)], ids=["here", "isolated"])
def test_one_message_forks_a_state_over_many_lanes(isolation: Any) -> None:
    with (
        serve_gym(Walk, isolation=isolation) as server,
        closing(make_vec_remote(server.url, num_envs=64, lanes=True, blocking=True, timeout=DEADLINE)) as envs,
    ):
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(np.ones(64, np.int64))
        (state,) = envs.save_state(slots=[5])
        observations, infos = envs.restore_state(state, seed=7)
        assert (observations == observations[0]).all()
        assert infos["t"].tolist() == [3] * 64
        first = [envs.step(np.zeros(64, np.int64))[0] for _ in range(3)]
        assert len({row.tobytes() for row in first[-1]}) == 64, "each lane draws for itself"
        envs.restore_state(state, seed=7)
        assert_identical([envs.step(np.zeros(64, np.int64))[0] for _ in range(3)], first)
        # Without a seed all go on as the original.
        envs.restore_state(state)
        same = envs.step(np.zeros(64, np.int64))[0]
        assert (same == same[0]).all()


@pytest.mark.parametrize("blocking", sampled([True, False], 2, slow=True), ids=["blocking", "slots"])
def test_some_slots_are_restored_and_the_others_go_on(blocking: bool) -> None:
    with (
        serve_gym(Walk) as server,
        closing(make_vec_remote(server.url, num_envs=4, lanes=True, blocking=blocking, timeout=DEADLINE)) as envs,
    ):
        envs.reset(seed=0)
        for _ in range(5):
            envs.step([1, 1, 1, 1])
        states = envs.save_state(slots=[2, 0])
        saved = [envs.step([0, 0, 0, 0])[0] for _ in range(2)]
        envs.restore_state([states[1], states[0]], slots=[0, 2])
        again = [envs.step([0, 0, 0, 0])[0] for _ in range(2)]
        for mine, theirs in zip(again, saved, strict=True):
            for slot in (0, 2):
                assert_identical(np.asarray(mine[slot]), np.asarray(theirs[slot]))
            for slot in (1, 3):
                assert not np.array_equal(mine[slot], theirs[slot])


def test_worlds_of_one_server_share_its_states() -> None:
    with (
        serve_gym(Walk) as server,
        closing(make_vec_remote(server.url, num_envs=3, lanes=False, blocking=True, timeout=DEADLINE)) as envs,
    ):
        envs.reset(seed=0)
        (state,) = envs.save_state(slots=[1])
        wanted = envs.step(np.array([2, 2, 2]))[0][1]
        envs.restore_state(state)
        assert_identical(envs.step(np.array([2, 2, 2]))[0], np.array([wanted] * 3))


@pytest.mark.slow
def test_worlds_in_processes_of_their_own_share_none() -> None:
    with (
        serve_gym(Walk, isolation="process") as server,
        closing(make_vec_remote(server.url, num_envs=2, lanes=False, blocking=True, timeout=DEADLINE)) as envs,
    ):
        envs.reset(seed=0)
        (state,) = envs.save_state(slots=[0])
        with pytest.raises(RefusedError, match="restore it where it was saved") as refused:
            envs.restore_state(state, slots=[1])
        assert refused.value.code == Code.FAILED_PRECONDITION
        envs.restore_state(state, slots=[0])


@pytest.mark.slow
def test_a_slot_at_another_server_is_refused_by_name_and_nothing_is_sent() -> None:
    with (
        serve_gym(Walk) as one,
        serve_gym(Walk) as other,
        closing(make_vec_remote([one.url, other.url], blocking=True, timeout=DEADLINE)) as envs,
    ):
        envs.reset(seed=0)
        (state,) = envs.save_state(slots=[0])
        with pytest.raises(SettingError, match=f"slot 1 is at {other.url}, and the state is kept at {one.url}"):
            envs.restore_state(state)
        envs.restore_state(state, slots=[0])
        with closing(make_remote(other.url, timeout=DEADLINE)) as env:
            env.reset(seed=0)
            with pytest.raises(RefusedError, match="saved at another server, or before this one was started"):
                env.restore_state(state)
            env.step(0)


@pytest.mark.slow
def test_a_state_is_pickled_by_its_fields_and_restored_by_another_client() -> None:
    with serve_gym(Walk, token="secret") as server:
        with closing(make_remote(server.url, token="secret", timeout=DEADLINE)) as env:
            env.reset(seed=0)
            state = env.save_state()
            data = pickle.dumps(state)
            assert b"secret" not in data
            copied = pickle.loads(data)
            assert copied == state
            with pytest.raises(SettingError, match="release_states"):
                copied.release()
            with closing(make_remote(server.url, token="secret", timeout=DEADLINE)) as friend:
                friend.reset(seed=9)
                friend.restore_state(copied)
                assert_identical(friend.step(1), env.step(1))
            state.release()
            state.release()
            with pytest.raises(RefusedError, match="it was released") as refused:
                env.restore_state(copied)
            assert refused.value.code == Code.NOT_FOUND
            env.step(0)
        with pytest.raises(SettingError, match="expected bytes of a SavedState to be int"):
            SavedState("a", "b", "c", "d", "e")  # type: ignore[arg-type]


def test_a_state_of_other_arguments_or_of_another_environment_is_refused() -> None:
    with (
        serve_gym(["FrozenLake-v1", "CartPole-v1"]) as server,
        closing(make_remote(f"{server.url}/FrozenLake-v1", timeout=DEADLINE)) as env,
        closing(make_remote(f"{server.url}/FrozenLake-v1?kwargs.is_slippery=False", timeout=DEADLINE)) as dry,
        closing(make_remote(f"{server.url}/CartPole-v1", timeout=DEADLINE)) as cart,
    ):
        for each in (env, dry, cart):
            each.reset(seed=0)
        state = env.save_state()
        for each in (dry, cart):
            with pytest.raises(RefusedError, match="another environment, or of one with other arguments"):
                each.restore_state(state)
            each.step(0)


def test_bounds_are_refused_by_name_and_drop_nothing() -> None:
    limits = States(max_states=3)
    with serve_gym(Walk, states=limits) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        states = [env.save_state() for _ in range(3)]
        with pytest.raises(RefusedError, match="3 states of at most max_states=3") as refused:
            env.save_state()
        assert refused.value.code == Code.RESOURCE_EXHAUSTED
        states[1].release()
        env.save_state()
        env.restore_state(states[0])
        with closing(make_remote(server.url, timeout=DEADLINE)) as other:
            other.reset(seed=0)
            other.save_state()  # what one client has does not keep others from saving
    limits = States(max_state_bytes=100)
    with serve_gym(Walk, states=limits) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        with pytest.raises(RefusedError, match="of at most max_state_bytes=100"):
            env.save_state()
        env.step(0)
        with Inspector(server.url, DEADLINE) as inspector:
            assert unpack_tensor(inspector.read_property("server.messages.states.states")) == 0


def test_states_go_some_time_after_their_clients_left() -> None:
    with serve_gym(Walk, states=States(state_abandoned_timeout=0.05)) as server:
        with closing(make_remote(server.url, timeout=DEADLINE)) as env:
            env.reset(seed=0)
            env.save_state()
        with Inspector(server.url, DEADLINE) as inspector:
            waited = 0
            while unpack_tensor(inspector.read_property("server.messages.states.states")) and waited < 100_000:
                waited += 1
            assert waited < 100_000


FORM = MessageForm(
    "states",
    "type.googleapis.com/gymnasium_bridge.StatesRequest",
    "type.googleapis.com/gymnasium_bridge.StatesResponse",
    places=True,
)


def test_a_guessed_identifier_and_a_broken_request_touch_nothing() -> None:
    with serve_gym(Walk) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        state = env.save_state()
        start = state.identifier.partition(".")[0]
        for guess in ("", "x", start, f"{start}.", f"{start}.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "\0" * 100):
            forged = SavedState(guess, state.url, "copy", 0, state.environment)
            with pytest.raises(RefusedError, match="there is no such state"):
                env.restore_state(forged)
        for request in (b"", b"\xff\xff\xff", b"\n\x00" * 3, b"\x12\x08\n\x06\n\x01x\x10\xff\x7f"):
            with pytest.raises(RefusedError):
                env.send_message(FORM, request)
        wanted = env.step(1)
        env.restore_state(state)
        assert_identical(env.step(1), wanted)


@pytest.mark.slow
def test_who_watches_saves_nothing_and_a_server_may_have_no_states() -> None:
    with (
        serve_gym(Walk, token="play", auth=Auth(watch_token="watch")) as server,
        closing(make_remote(f"{server.url}?world=", token="play", timeout=DEADLINE)) as env,
    ):
        env.reset(seed=0)
        state = env.save_state()
        for token in ("play", "watch"):
            with closing(make_remote(f"{server.url}?world=", token=token, role="spectator")) as watcher:
                with pytest.raises(RefusedError) as refused:
                    watcher.save_state()
                assert refused.value.code == Code.PERMISSION_DENIED
                with pytest.raises(RefusedError) as refused:
                    watcher.restore_state(state)
                assert refused.value.code == Code.PERMISSION_DENIED
        env.step(0)
    with serve_gym(Walk, states=False) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        with pytest.raises(RefusedError, match="unknown extension") as refused:
            env.save_state()
        assert refused.value.code == Code.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"fps": 100.0}, "needs a lock-step world with one client"),
        ({"num_envs": 2, "vectorization_mode": "async"}, "in other processes, and are not saved"),
    ],
    ids=["realtime", "async"],
)
def test_kinds_of_worlds_that_have_no_states_say_so(given: dict[str, Any], told: str) -> None:
    with serve_gym("CartPole-v1", **given) as server, closing(make_vec_remote(server.url, timeout=DEADLINE)) as envs:
        envs.reset(seed=0)
        with pytest.raises(RefusedError, match=told) as refused:
            envs.save_state()
        assert refused.value.code == Code.UNIMPLEMENTED
