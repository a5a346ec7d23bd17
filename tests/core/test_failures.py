"""A failure gives an error that says what was expected, what came and what to do; everything else goes on."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import (
    Limits,
    SlotState,
    errors,
    make_remote,
    make_vec_remote,
    serve_gym,
)
from bridge.core.encoding.values import encode
from bridge.testing import CountingEnv, FailingEnv, SlowResetEnv
from bridge.wrappers import BlockingReset
from tests.inside import begin_step, finish_step
from tests.support import SERVE, free_port, server_process, until, world_of

ZEROS = {n: np.zeros(n, np.int64) for n in (1, 2, 3, 4)}


class StuckEnv(CountingEnv):
    """Its n-th step waits for the test."""

    def __init__(self, release: threading.Event, stuck_in_step: int) -> None:
        super().__init__(1000)
        self.release, self.stuck_in_step, self.steps_asked = release, stuck_in_step, 0

    def step(self, action: Any) -> Any:
        self.steps_asked += 1
        if self.steps_asked == self.stuck_in_step:
            self.release.wait(30)
        return super().step(action)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """The event that a stuck environment waits for; set at the end, whatever happens."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("make", [make_remote, make_vec_remote])
@pytest.mark.parametrize("url", ["http://localhost:1", "localhost", "grpc://localhost:notaport", "", "grpc://:1"])
def test_a_bad_url_shows_the_right_form(make: Callable[[str], Any], url: str) -> None:
    with pytest.raises(errors.AddressError, match="grpc://HOST:PORT"):
        make(url)


@pytest.mark.parametrize("make", [make_remote, make_vec_remote])
def test_a_port_where_nobody_listens_is_named(make: Callable[..., Any]) -> None:
    url = f"grpc://127.0.0.1:{free_port()}"
    with pytest.raises(errors.ConnectError, match="Is the server running there") as caught:
        make(url, timeout=20)
    assert caught.value.url == url


@pytest.mark.parametrize("make", [make_remote, make_vec_remote])
def test_a_port_that_accepts_and_says_nothing_ends_at_the_deadline(make: Callable[..., Any]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        said = r"no answer to join a world within 0\.5 s; nothing has come from there at all: are host and port right"
        with pytest.raises(errors.RemoteTimeoutError, match=said):
            make(f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.5)


def test_a_grpc_server_of_another_kind_is_recognized() -> None:
    import concurrent.futures

    import grpc

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(errors.ConnectError, match="does not speak dm_env_rpc"):
            make_remote(f"127.0.0.1:{port}", timeout=20)
    finally:
        server.stop(0).wait(10)


def test_an_unknown_environment_is_answered_by_what_there_is() -> None:
    with serve_gym(["CartPole-v1", "Acrobot-v1"]) as server:
        with pytest.raises(
            errors.RefusedError, match=r"'Pong-v1' is not served here.*CartPole-v1, Acrobot-v1"
        ) as caught:
            make_remote(server.url, env_id="Pong-v1")
        assert caught.value.code == errors.Code.NOT_FOUND
        with pytest.raises(
            errors.RefusedError, match="name one of the environments, in the path of the URL or by env_id"
        ):
            make_remote(f"{server.url}?num_envs=1")
        remote = make_remote(f"{server.url}/Acrobot-v1")
        assert remote.observation_space.shape == (6,)
        remote.close()
    with pytest.raises(errors.SettingError, match=r"cannot serve 'NoSuch-v0'"):
        serve_gym("NoSuch-v0")


def test_wrong_kwargs_are_answered_by_what_the_environment_takes() -> None:
    with serve_gym("CartPole-v1") as server:
        with pytest.raises(
            errors.RefusedError, match=r"unexpected keyword argument 'gravity'.*sutton_barto_reward"
        ) as caught:
            make_remote(server.url, env_kwargs={"gravity": 3.0})
        assert caught.value.code == errors.Code.INVALID_ARGUMENT
        with pytest.raises(errors.RefusedError, match=r"unknown CreateWorld settings colour.*num_envs"):
            make_remote(f"{server.url}?colour=red")
        assert server.worlds == []


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (2, "max 1, got 2, which is above the maximum"),
        (-1, "below the minimum"),
        (0.0, r"expected integers \(int64\), got 0.0"),
        ("left", "expected numbers for int64, got str 'left'"),
        (np.array([1]), r"expected a single integer, got the shape \(1,\)"),
        (None, "expected numbers"),
    ],
)
def test_a_wrong_action_says_what_was_expected_and_the_episode_goes_on(action: Any, said: str) -> None:
    local = gymnasium.make("CartPole-v1")
    with serve_gym("CartPole-v1") as server:
        remote = make_remote(server.url)
        remote.reset(seed=1)
        local.reset(seed=1)
        with pytest.raises(errors.InvalidActionError, match=said):
            remote.step(action)
        assert remote.step(1)[0].tobytes() == local.step(1)[0].tobytes()
        remote.close()
    local.close()


@pytest.mark.parametrize("make", [make_remote, make_vec_remote])
def test_an_unknown_keyword_raises_type_error_and_nothing_else(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(TypeError, match="unexpected keyword argument 'numenvs'"):
        make("grpc://127.0.0.1:1", numenvs=3)
    gc.collect()
    assert unraisable == []


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ({"wait": "next_frame"}, "wait is for real-time worlds"),
        ({"agent": "left"}, "agent is for worlds of several agents"),
    ],
)
def test_a_keyword_of_another_kind_of_world_is_told_where_it_belongs(keyword: dict[str, str], said: str) -> None:
    with serve_gym("CartPole-v1") as server, pytest.raises(errors.RefusedError, match=said):
        make_remote(server.url, **keyword)


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        (np.zeros(3, np.int64), r"expected the shape \(2,\), got \(3,\)"),
        (np.array([0, 2]), "above the maximum"),
        (np.array([0.0, 1.0]), "expected integers"),
        (0, r"expected the shape \(2,\), got \(\)"),
        ([0, None], "expected numbers"),
    ],
)
def test_wrong_actions_of_a_vector_send_nothing(actions: Any, said: str) -> None:
    with serve_gym("CartPole-v1") as one, serve_gym(CountingEnv, num_envs=2) as lanes:
        for url in (one.url, lanes.url):
            envs = BlockingReset(make_vec_remote(url, num_envs=2))
            envs.reset(seed=1)
            before = envs.step(ZEROS[2])
            with pytest.raises(errors.InvalidActionError, match=said):
                envs.step(actions)
            envs.reset(seed=1)
            again = envs.step(ZEROS[2])
            if url == one.url:
                assert before[0].tobytes() == again[0].tobytes()
            envs.close()


@pytest.mark.parametrize("action", [np.zeros(2, np.float32), np.array([np.nan]), np.array([3.0]), np.array([1e300])])
def test_a_box_action_of_the_wrong_shape_or_range_is_refused(action: Any) -> None:
    with serve_gym("Pendulum-v1") as server:
        remote = make_remote(server.url)
        remote.reset(seed=1)
        with pytest.raises(errors.InvalidActionError):
            remote.step(action)
        remote.step(np.array([0.1]))  # a float64 is rounded
        remote.close()


def test_step_before_reset_and_after_an_episodes_end_tell_what_to_call() -> None:
    """U-8."""
    with serve_gym(lambda: CountingEnv(2)) as server:
        remote = make_remote(server.url)
        with pytest.raises(errors.ResetNeededError, match=r"expected reset\(\) before step\(\)"):
            remote.step(0)
        remote.reset()
        while not any(remote.step(0)[2:4]):
            pass
        with pytest.raises(gymnasium.error.ResetNeeded, match="the episode has ended"):
            remote.step(0)
        remote.close()
        with pytest.raises(errors.ClosedError):
            remote.reset()
        envs = make_vec_remote(server.url)
        with pytest.raises(errors.ResetNeededError):
            envs.step(ZEROS[1])
        envs.close()
        with pytest.raises(gymnasium.error.ClosedEnvironmentError):
            envs.reset()


def test_an_environment_that_raises_in_reset_or_step_sends_its_traceback() -> None:
    with serve_gym(lambda: FailingEnv(fail_in_step=2, length=50)) as server:
        remote = make_remote(server.url)
        remote.reset()
        remote.step(0)
        with pytest.raises(errors.EnvironmentFailedError, match=r"raised TestFailure in step: step 2 fails") as caught:
            remote.step(0)
        assert "Traceback" in caught.value.reason
        assert "fails on purpose" in str(pickle.loads(pickle.dumps(caught.value)))
        remote.step(0)  # the connection and the environment go on
        remote.close()
    with serve_gym(lambda: FailingEnv(fail_in_reset=1)) as server:
        remote = make_remote(server.url)
        with pytest.raises(errors.EnvironmentFailedError, match="raised TestFailure in reset"):
            remote.reset()
        remote.reset()
        remote.close()


def test_an_environment_that_raises_in_step_ends_its_own_episode_alone() -> None:
    """A crash of one slot is a truncation of that slot, with the reason, and the others go on."""
    with serve_gym(lambda: FailingEnv(fail_in_step=3, length=50)) as bad, serve_gym(lambda: CountingEnv(50)) as good:
        envs = BlockingReset(make_vec_remote([good.url, bad.url, good.url]))
        envs.reset(seed=0)
        for step in range(1, 8):
            observations, rewards, terminations, truncations, infos = envs.step(ZEROS[3])
            assert truncations.tolist() == [False, step == 3, False]
            assert not terminations.any()
            assert ("error" in infos) == (step == 3)
            assert observations[0][1] == observations[2][1] == step
            if step == 3:
                assert "step 3 fails on purpose" in infos["error"][1]
                assert infos["_error"].tolist() == [False, True, False]
                assert rewards[1] == 0.0
                assert observations[1][1] == 2  # the last observation that it had
            if step == 4:
                assert observations[1][1] == 0  # its next episode begins as after any other end
        envs.close()


def test_an_environment_whose_resets_all_fail_is_raised_after_some_attempts() -> None:
    class Broken(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            raise RuntimeError("the simulator is not licensed")

    with serve_gym(Broken) as bad, serve_gym(CountingEnv) as good:
        envs = BlockingReset(make_vec_remote([good.url, bad.url]))
        with pytest.raises(errors.EnvironmentFailedError, match="the simulator is not licensed") as caught:
            envs.reset()
        assert caught.value.url == bad.url
        envs.close()


def test_reset_settings_that_are_refused_are_raised() -> None:
    with serve_gym("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point") as server:
        envs = BlockingReset(make_vec_remote(server.url))
        with pytest.raises(errors.RefusedError, match="takes one integer seed"):
            envs.reset(seed=[5, 3])
        envs.reset(seed=5)
        with pytest.raises(errors.RefusedError, match="cannot reset some of its lanes alone"):
            envs.reset(options={"reset_mask": np.array([True, False])})
        assert envs.step(np.zeros(2, np.int64))[3].all(), "no lane's episode ends without a sign"
        envs.close()
    with serve_gym("CartPole-v1") as server:
        envs = BlockingReset(make_vec_remote(server.url))
        with pytest.raises(errors.SettingError, match="Seed must be greater or equal to zero"):
            envs.reset(seed=-1)
        envs.close()


def test_a_stuck_step_ends_at_the_deadline(release: threading.Event) -> None:
    with serve_gym(lambda: StuckEnv(release, 2)) as server:
        remote = make_remote(server.url, timeout=0.5)
        remote.reset()
        remote.step(0)
        with pytest.raises(
            errors.RemoteTimeoutError, match=r"no answer to a step within 0\.5 s; is the environment stuck"
        ):
            remote.step(0)
        with pytest.raises(errors.ResetNeededError, match="timed out"):
            remote.step(0)  # the late answer is never taken for that of a later step
        release.set()
        observation, _ = remote.reset()
        assert observation[1] == 0
        remote.close()


def test_a_stuck_slot_is_cut_off_at_the_deadline_and_the_others_go_on(release: threading.Event) -> None:
    with (
        serve_gym(lambda: StuckEnv(release, 2), thread_safe=True) as stuck,
        serve_gym(lambda: CountingEnv(100)) as good,
    ):
        envs = make_vec_remote([stuck.url, good.url], timeout=0.5)
        envs.reset()
        until(lambda: all(o is not None for o in envs.step(ZEROS[2])[0]) or envs.slot_states[0] == SlotState.LOST)
        for _ in range(3):
            observations, _, _, truncations, infos = envs.step(ZEROS[2])
            if truncations[0]:
                assert "no answer to a step within 0.5 s" in infos["error"][0]
                break
        assert truncations.tolist() == [True, False]
        assert observations[0] is None
        assert observations[1] is not None
        release.set()
        envs.close()


def test_a_server_killed_in_the_middle_of_a_step_is_told() -> None:
    with server_process(SERVE, "CartPole-v1", fresh=True) as (process, url):
        remote = make_remote(url, timeout=20)
        remote.reset(seed=1)
        process.send_signal(signal.SIGSTOP)  # the step is under way when the server goes
        os.waitpid(process.pid, os.WUNTRACED)  # none of its threads runs any more
        begin_step(remote, 0)
        process.kill()
        with pytest.raises(errors.ConnectionLostError, match="the connection was lost"):
            finish_step(remote)
        with pytest.raises(errors.ConnectError):
            remote.reset()  # it tries anew
        remote.close()


@pytest.mark.parametrize("lanes", ["1", "2"])
def test_a_killed_server_truncates_its_own_slots_once_and_the_others_go_on(
    lanes: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine = int(lanes)
    with ExitStack() as stack:
        good = stack.enter_context(serve_gym("CartPole-v1"))
        process, url = stack.enter_context(server_process(SERVE, "CartPole-v1", lanes))
        envs = make_vec_remote([good.url, url], timeout=20)
        actions = np.zeros(1 + mine, np.int64)
        envs.reset(seed=1)
        until(lambda: all(observation is not None for observation in envs.step(actions)[0]))
        process.kill()
        process.wait(20)
        seen = np.zeros(1 + mine, np.int64)
        for _ in range(30):
            observations, _, _, truncations, infos = envs.step(actions)
            seen += truncations
            assert observations[0] is not None or envs.slot_states[0] == SlotState.RESETTING
            if truncations[1]:
                assert url in infos["error"][1]
                assert observations[1] is None
                assert url in infos["n"][1]["error"]
        assert seen[1:].tolist() == [1] * mine
        assert set(envs.slot_states[1:].tolist()) <= {SlotState.LOST, SlotState.CONNECTING}
        envs.close()
    said = [record.getMessage() for record in caplog.records if "truncated" in record.getMessage()]
    title = "slot 1: episode" if mine == 1 else "slots 1 to 2: episodes"
    assert len(said) == 1
    assert said[0].startswith(f"{title} truncated: {url}: ")


def test_blocking_reset_names_the_urls_that_are_away() -> None:
    with ExitStack() as stack:
        good = stack.enter_context(serve_gym("CartPole-v1"))
        process, url = stack.enter_context(server_process(SERVE, "CartPole-v1"))
        envs = BlockingReset(make_vec_remote([good.url, url], timeout=20), timeout=1.0)
        envs.reset(seed=1)
        process.kill()
        process.wait(20)
        observations, rewards, _, truncations, infos = envs.step(ZEROS[2])
        assert truncations.tolist() == [False, True]  # an ordinary truncation
        assert observations.shape == (2, 4)
        assert rewards[1] == 0.0
        assert url in infos["error"][1]
        with pytest.raises(errors.RemoteTimeoutError, match=r"no observation within 1 s") as caught:
            envs.step(ZEROS[2])
        assert url in str(caught.value)
        assert good.url not in str(caught.value)
        envs.close()


def test_a_slow_reset_reads_none_and_holds_up_nobody(release: threading.Event) -> None:
    """U-2, U-5, U-6."""
    slow_env = SlowResetEnv(release, deadline=30.0, free_resets=0, length=3)
    with serve_gym(lambda: slow_env, thread_safe=True) as slow, serve_gym(lambda: CountingEnv(3)) as quick:
        envs = make_vec_remote([slow.url, quick.url])
        observations, infos = envs.reset(seed=1)
        assert observations == (None, None) or observations[0] is None
        assert len(infos["n"]) == 2  # U-7
        until(lambda: envs.step(ZEROS[2])[0][1] is not None)
        episodes = 0
        for _ in range(30):
            observations, rewards, terminations, truncations, infos = envs.step(ZEROS[2])
            assert observations[0] is None
            assert (rewards[0], terminations[0], truncations[0]) == (0.0, False, False)
            assert infos["slot_state"][0] == SlotState.RESETTING
            episodes += int(terminations[1] or truncations[1])
        assert episodes >= 2  # U-4: the quick slot begins its episodes by itself
        release.set()
        until(lambda: envs.step(ZEROS[2])[0][0] is not None)
        envs.close()


def test_connections_beyond_the_limit_are_refused_at_once_by_name() -> None:
    with serve_gym("CartPole-v1", limits=Limits(max_connections=2)) as server:
        held = [make_remote(server.url), make_remote(server.url)]
        with pytest.raises(errors.RefusedError, match="max_connections=2") as caught:
            make_remote(server.url, timeout=20)
        assert caught.value.code == errors.Code.RESOURCE_EXHAUSTED
        for remote in held:
            remote.reset()  # the others are untouched
        held.pop().close()
        until(lambda: server.connections == 1)
        make_remote(server.url).close()
        held.pop().close()


def test_worlds_and_lanes_beyond_the_limit_are_refused_by_name() -> None:
    with serve_gym("CartPole-v1", limits=Limits(max_worlds=1, max_lanes=4)) as server:
        with pytest.raises(errors.RefusedError, match=r"num_envs.*from 1 to 4"):
            make_vec_remote(f"{server.url}?num_envs=5")
        remote = make_remote(server.url)
        with pytest.raises(errors.RefusedError, match="max_worlds=1"):
            make_remote(server.url, render_mode="rgb_array")
        remote.close()


@pytest.mark.slow
def test_messages_of_any_size_pass_up_to_the_named_limit() -> None:
    from bridge.testing import SpaceEnv

    space = gymnasium.spaces.Box(0, 255, (1500, 2000, 3), np.uint8)  # 9 MB, beyond gRPC's own 4 MiB
    with serve_gym(lambda: SpaceEnv(space, infos=False)) as server:
        remote = make_remote(server.url)
        assert remote.reset(seed=1)[0].shape == space.shape
        remote.close()
    with serve_gym(lambda: SpaceEnv(space, infos=False), limits=Limits(max_message_bytes=1_000_000)) as server:
        remote = make_remote(server.url)
        with pytest.raises(errors.RefusedError, match="max_message_bytes=1000000"):
            remote.reset(seed=1)
        remote.close()


def test_two_threads_in_one_environment_are_an_error_not_a_race(release: threading.Event) -> None:
    slow_env = SlowResetEnv(release, deadline=30.0)
    with serve_gym(lambda: slow_env) as server:
        remote = make_remote(server.url)
        other = threading.Thread(target=remote.reset)
        other.start()
        assert slow_env.in_reset.wait(20)
        with pytest.raises(errors.ConcurrentUseError, match="another thread is using"):
            remote.step(0)
        release.set()
        other.join(20)
        remote.close()


def test_asynchronous_calls_out_of_turn_are_refused() -> None:
    with serve_gym(CountingEnv) as server:
        envs = make_vec_remote(server.url)
        with pytest.raises(gymnasium.error.NoAsyncCallError, match="expected reset_async before reset_wait"):
            envs.reset_wait()
        envs.reset_async()
        with pytest.raises(errors.AlreadyPendingError, match="call reset_wait first"):
            envs.step_async(ZEROS[1])
        envs.reset_wait()
        envs.close()


def test_worlds_of_different_spaces_do_not_make_a_vector() -> None:
    with (
        serve_gym("CartPole-v1") as one,
        serve_gym("Pendulum-v1") as other,
        pytest.raises(errors.SettingError, match="worlds of equal spaces"),
    ):
        make_vec_remote([one.url, other.url])
    with serve_gym("CartPole-v1", num_envs=4) as server:
        with pytest.raises(errors.SettingError, match=r"num_envs=6 is no multiple of the 4 slots"):
            make_vec_remote(server.url, num_envs=6)
        with pytest.raises(errors.SettingError, match="use make_vec_remote"):
            make_remote(server.url)


def test_what_an_info_cannot_carry_is_left_out_and_named_once() -> None:
    class Odd(CountingEnv):
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            return (*rest, {"fine": 1, "engine": object(), "range": range(3)})

    with serve_gym(lambda: Odd(50)) as server:
        remote = make_remote(server.url)
        remote.reset()
        with (
            pytest.warns(RuntimeWarning, match=r"info\['engine'\] is of type object"),
            pytest.warns(RuntimeWarning, match=r"info\['range'\] is of type range"),
        ):
            assert remote.step(0)[4] == {"fine": 1}
        assert remote.step(0)[4] == {"fine": 1}  # a second warning would be an error here
        remote.close()


def test_a_request_that_is_too_large_to_be_sent_leaves_the_answers_of_others_in_order() -> None:
    with serve_gym(lambda: CountingEnv(50)) as server:
        remote = make_remote(server.url, max_message_bytes=10_000, timeout=20.0)
        remote.reset()
        with pytest.raises(errors.SettingError, match="larger than max_message_bytes=10000"):
            remote.call("get_wrapper_attr", "x" * 20_000)
        assert remote.step(0)[1] == 1.0
        remote.close()


@pytest.mark.parametrize("options", [3, [("low", 1)], "ab"])
def test_reset_options_that_are_no_dict_are_refused_and_leave_environments_as_they_are(options: Any) -> None:
    with serve_gym(lambda: CountingEnv(50)) as server:
        env, envs = make_remote(server.url), BlockingReset(make_vec_remote(server.url))
        for one in (env, envs):
            with pytest.raises(errors.SettingError, match="expected options to be a dict"):
                one.reset(options=options)
            one.reset(options={"low": 1})
            one.close()


TEXT = gymnasium.spaces.Text(20_000)
LONG = "x" * 15_000


def test_a_step_or_reset_that_is_too_large_to_be_sent_leaves_an_environment_as_it_is() -> None:
    with serve_gym(lambda: CountingEnv(50, action_space=TEXT)) as server:
        env = make_remote(server.url, max_message_bytes=10_000, timeout=20.0)
        env.reset()
        assert env.step("x")[0].tolist() == [1, 1]
        for call in (lambda: env.step(LONG), lambda: env.reset(options={"text": LONG})):
            with pytest.raises(errors.SettingError, match="larger than max_message_bytes=10000"):
                call()
        assert env.step("x")[0].tolist() == [1, 2]
        env.close()


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_step_or_reset_that_is_too_large_for_one_slot_leaves_all_as_they_are(lanes: int) -> None:
    with serve_gym(lambda: CountingEnv(50, action_space=TEXT), num_envs=lanes) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=3, max_message_bytes=10_000, timeout=20.0))
        envs.reset()
        options = [{"text": LONG if lanes == 3 or slot == 2 else ""} for slot in range(3)]
        for call in (
            lambda: envs.step(("x", "x", LONG)),
            lambda: envs.send(("x", "x", LONG)),
            lambda: envs.reset_async(slot_options=options),
        ):
            with pytest.raises(errors.SettingError, match="larger than max_message_bytes=10000"):
                call()
        assert envs.step(("x", "x", "x"))[0].tolist() == [[1, 1]] * 3
        assert envs.report()["steps_asked"] == envs.report()["steps_received"] == 3
        envs.close()


def test_steps_of_one_form_that_are_too_large_to_be_sent_change_nothing() -> None:
    with serve_gym(lambda: CountingEnv(50, action_space=gymnasium.spaces.Box(-1, 1, (3000,)))) as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=2, max_message_bytes=10_000, timeout=20.0))
        envs.reset()
        for _ in range(2):
            with pytest.raises(errors.SettingError, match="larger than max_message_bytes=10000"):
                envs.step(envs.action_space.sample())
        assert envs.report()["steps_asked"] == 0
        assert envs.get_attr("steps") == (0, 0)
        envs.close()


def test_an_observation_that_its_space_cannot_hold_costs_that_slot_alone() -> None:
    """D-19: a float16 travels in 32 bits, of which a broken server may use more."""

    class Small(CountingEnv):
        def __init__(self) -> None:
            super().__init__(100)
            self.observation_space = gymnasium.spaces.Box(0, 1000, (2,), np.float16)

        def reset(self, **more: Any) -> Any:
            observation, info = super().reset(**more)
            return observation.astype(np.float16), info

        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            return observation.astype(np.float16), *rest

    with serve_gym(Small) as good, serve_gym(Small) as bad:
        envs = make_vec_remote([good.url, bad.url, good.url], timeout=20)
        blocking = BlockingReset(envs)
        blocking.reset(seed=0)
        agent: Any = world_of(bad, bad.worlds[0]).pacer._agent  # type: ignore[attr-defined]
        values = agent.values
        agent.values = lambda uids: [np.full(2, 1e10, np.float32), *values(uids)[1:]]
        observations, _, _, truncations, infos = envs.step(np.zeros(3, np.int64))
        assert truncations.tolist() == [False, True, False]
        assert [None if row is None else row.tolist() for row in observations] == [[1, 1], None, [1, 1]]
        assert "its observations cannot be read" in str(infos["error"][1])
        envs.close()


@pytest.mark.parametrize("info", [5, "text", None, [{}], [1], np.zeros(3)], ids=repr)
def test_an_info_that_is_no_dict_costs_that_slot_alone(info: Any) -> None:
    with serve_gym(lambda: CountingEnv(100)) as good, serve_gym(lambda: CountingEnv(100)) as bad:
        envs = make_vec_remote([good.url, bad.url], timeout=20)
        BlockingReset(envs).reset(seed=0)
        agent: Any = world_of(bad, bad.worlds[0]).pacer._agent  # type: ignore[attr-defined]
        values = agent.values
        agent.values = lambda uids: [*values(uids)[:-1], np.frombuffer(encode(info), np.uint8)]
        _, _, _, truncations, infos = envs.step(np.zeros(2, np.int64))
        assert truncations.tolist() == [False, True]
        assert "its info cannot be read: expected a dict" in str(infos["error"][1])
        envs.close()
