"""`exchange` without waiting: a real-time world whose frames are the calls of a program."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from bridge import RealTime, make_remote, make_vec_remote, serve_game
from bridge.errors import Code, RefusedError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import check_server
from tests.game.loops import ACTION, OBSERVATION, in_thread, walking
from tests.peers import Stream
from tests.support import until

AT_START = np.zeros(2, np.float32)


@pytest.fixture
def game(process):
    with serve_game(OBSERVATION, ACTION, process=process) as made:
        yield made


def joined(game):
    """Join a game whose loop the test runs: frame by frame, in this thread.

    Each Step has its own answer: where the game is far away for its measured rate, others would be sent ahead.
    """
    found = []
    with in_thread(lambda: found.append(make_remote(game.url, wait="now"))):
        until(lambda: found or (game.exchange(AT_START), game.begins, False)[2])
    return found[0]


def begin(game, env, **reset):
    """Have an agent reset; return what the game was asked for, and what the agent sees."""
    seen, asked = [], []

    def turn():
        game.exchange(AT_START)
        if game.begins:
            asked.append((game.seed, game.options))
        return bool(seen)

    with in_thread(lambda: seen.append(env.reset(**reset))):
        until(turn)
    return asked, seen[0]


def test_the_first_call_begins_a_round_although_nobody_is_there(game):
    assert game.exchange(AT_START) is None
    assert game.begins
    assert (game.seed, game.options) == (None, None)
    assert game.exchange(AT_START) == 0
    assert not game.begins


def test_what_nobody_plays_gets_the_default_action(process):
    with serve_game(OBSERVATION, ACTION, process=process, default_action=3) as game:
        game.exchange(AT_START)
        assert game.begins
        assert [game.exchange(AT_START) for _ in range(3)] == [3, 3, 3]


def test_the_very_next_call_takes_the_newest_action_and_the_agent_sees_what_came_of_it(game, process):
    env = joined(game)
    _, (_, began) = begin(game, env, seed=1)
    # Before any frame: the second replaces the first.
    told = [env.step(2), env.step(4)]
    assert game.exchange(AT_START) == 4
    assert game.exchange(np.array([7, 8], np.float32), 0.5) == 4, "it goes on"
    until(lambda: (told.append(env.step(1)), told[-1][0].tolist() == [7, 8])[1])
    assert process or len(told) == 3, "the next Step tells it, unless it is on its way to another process"
    assert sum(reward for _, reward, *_ in told) == 0.5
    # Each frame of the round is told once, that of a call while the Reset was answered in the first Step.
    counted = itertools.accumulate(info["frames"] for *_, info in told)
    (start,) = {info["latency"]["frame"] - frames for frames, (*_, info) in zip(counted, told, strict=True)}
    assert start <= began["latency"]["frame"]
    # What the program called while the Reset was answered comes first, and may be on its way to another process.
    late = sum(info["frames"] for *_, info in told[2:])
    assert late == 2 or (process and late > 2)
    assert game.exchange(AT_START) == 1
    env.close()


def test_a_reset_begins_a_round_with_its_seed_and_options_at_the_very_next_call(game):
    env = joined(game)
    asked, (seen, _) = begin(game, env, seed=3, options={"level": 2})
    assert asked == [(3, {"level": 2})]
    np.testing.assert_array_equal(seen, AT_START)
    asked, _ = begin(game, env)
    assert asked == [(None, None)]
    env.close()


def test_the_first_observation_of_a_round_has_no_reward_and_the_end_has_its_own(process):
    with walking(False, process=process, length=5, pause=0.02) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=0)
        totals, ended = 0.0, False
        while not ended:
            seen, reward, ended, truncated, _ = env.step(1)
            assert not truncated
            totals += reward
        assert seen[0] == 5
        assert totals == seen[1], "each frame's reward is told once"
        env.reset()
        until(lambda: len(walk.begun) > 2)
        env.close()


def test_infos_have_ages_frames_and_dropped_actions_as_of_a_clock(process):
    with walking(False, process=process) as walk:
        env = make_remote(walk.game.url)
        env.reset()
        told = [env.step(action)[4]["latency"] for action in (1, 2, 3)]
        # A frame takes 2 ms here: where the machine is busy, a step may return the last observation again.
        until(lambda: told.append(env.step(4)[4]["latency"]) or told[-1]["frame"] > 0)
        latency = told[-1]
        assert 0 <= latency["observation_age"] < 5
        assert [each["frame"] for each in told] == sorted(each["frame"] for each in told)
        assert {"frames_skipped", "actions_applied", "actions_replaced", "actions_dropped"} <= set(latency)
        env.close()


def test_an_action_that_is_too_old_gives_way_to_the_default(process):
    with serve_game(OBSERVATION, ACTION, process=process, realtime=RealTime(max_action_age=0.05)) as game:
        env = joined(game)
        begin(game, env)
        env.step(4)
        assert game.exchange(AT_START) == 4
        until(lambda: game.exchange(AT_START) == 0)
        env.close()


def test_the_default_acts_again_once_the_agent_has_left(game):
    env = joined(game)
    begin(game, env)
    env.step(4)
    assert game.exchange(AT_START) == 4
    env.close()
    until(lambda: game.exchange(AT_START) == 0)


def test_a_further_client_is_refused_and_may_watch(process):
    with walking(False, process=process) as walk:
        env = make_remote(walk.game.url)
        env.reset()
        with pytest.raises(RefusedError) as refused:
            make_remote(walk.game.url)
        assert refused.value.code == Code.RESOURCE_EXHAUSTED
        assert "join it with the setting role=spectator, or wait until a client leaves" in str(refused.value)
        assert "create another" not in str(refused.value), "a game is there once"
        with pytest.raises(RefusedError) as refused:
            make_remote(walk.game.url + "?level=3")
        assert refused.value.code == Code.RESOURCE_EXHAUSTED, "nobody gets a world of another kind"
        watcher = make_remote(walk.game.url + "?world=", role="spectator")
        rounds = len(walk.begun)
        watcher.reset(seed=9)
        watcher.step(3)
        env.step(1)
        assert len(walk.begun) == rounds, "who watches asks for no round"
        watcher.close()
        env.close()


def test_a_watcher_enters_the_round_that_runs(process):
    with walking(False, process=process) as walk:
        until(lambda: len(walk.taken) > 5)
        watcher = make_remote(walk.game.url + "?world=", role="spectator")
        seen, _ = watcher.reset()
        assert seen[0] > 3
        assert len(walk.begun) == 1
        watcher.close()


def test_a_client_that_comes_first_waits_for_the_loop(game):
    found = []
    with in_thread(lambda: found.append(make_remote(game.url))):
        until(lambda: game.server.connections)
        assert not found
        until(lambda: found or (game.exchange(AT_START), game.begins, False)[2])
    found[0].close()


def test_three_games_are_three_slots(process):
    with (
        walking(False, length=20, process=process) as one,
        walking(False, length=20, process=process) as two,
        walking(False, length=20, process=process) as three,
    ):
        envs = make_vec_remote([walk.game.url for walk in (one, two, three)], blocking=True)
        envs.reset(seed=10)
        for walk, seed in ((one, 10), (two, 11), (three, 12)):
            assert (seed, None) in walk.begun
        for _ in range(50):
            envs.step(np.ones(3, np.int64))
        envs.close()


def test_a_game_passes_what_a_real_time_world_has_to(process):
    with walking(False, length=50, process=process) as walk:
        report = check_server(walk.game.url)
        assert report.ok, str(report)


def test_a_game_has_no_lock_of_the_process(game):
    from tests.inside import lock_of_environments

    held, free = threading.Event(), threading.Event()

    def hold():
        with lock_of_environments():
            held.set()
            free.wait(10)

    with in_thread(hold):
        held.wait(10)
        assert game.exchange(AT_START) is None
        assert game.begins
        assert game.exchange(AT_START) == 0
        free.set()


@pytest.mark.parametrize("wait", [False, True])
def test_no_other_world_can_be_made_joined_or_destroyed(process, wait):
    with walking(wait, process=process) as walk:
        stream = Stream(walk.game.server)
        made = stream.ask(create_world=pb.CreateWorldRequest())
        assert made.error.code == Code.RESOURCE_EXHAUSTED
        assert "join its default world" in made.error.message
        with pytest.raises(RefusedError, match="there is no world 'other'"):
            make_remote(walk.game.url + "?world=other")
        destroyed = stream.ask(destroy_world=pb.DestroyWorldRequest(world_name=""))
        assert destroyed.error.code == Code.NOT_FOUND
        stream.close()
        env = make_remote(walk.game.url)  # it is there still
        env.reset(seed=1)
        env.step(1)
        env.close()


def test_clients_that_come_at_once_before_the_first_call_all_get_in(game):
    found = []
    url = game.url + "?world="
    with (
        in_thread(lambda: found.append(make_remote(url))),
        in_thread(lambda: found.append(make_remote(url, role="spectator"))),
        in_thread(lambda: found.append(make_remote(url, role="spectator"))),
    ):
        until(lambda: game.server.connections == 3)
        until(lambda: len(found) == 3 or (game.exchange(AT_START), game.begins, False)[2])
    for env in found:
        env.close()


@pytest.mark.parametrize("wait", [False, True])
def test_of_two_clients_at_once_one_plays_and_the_other_is_refused(process, wait):
    with walking(wait, process=process, timeout=0.5) as walk:
        for turn in range(3):
            together, played, refused = threading.Barrier(2), [], []

            def play(seed, together=together, played=played, refused=refused):
                together.wait(10)
                try:
                    env = make_remote(walk.game.url)
                except RefusedError as error:
                    refused.append(error.code)
                    return
                played.append(env)
                env.reset(seed=seed)
                env.step(1)

            with in_thread(lambda play=play, turn=turn: play(turn)), in_thread(lambda play=play, turn=turn: play(turn)):
                pass
            assert refused == [Code.RESOURCE_EXHAUSTED]
            played[0].close()  # in the midst of its round
        assert [seed for seed, _ in walk.begun if seed is not None] == [0, 1, 2]


def test_a_reward_beside_the_first_observation_is_left_out(process):
    totals, frame = [], 0

    def play():
        env = make_remote(game.url)
        for _ in range(2):
            env.reset()
            total, ended = 0.0, False
            while not ended:
                _, reward, ended, *_ = env.step(1)
                total += reward
            totals.append(total)
        env.close()

    with serve_game(OBSERVATION, ACTION, process=process) as game, in_thread(play) as thread:

        def turn():
            nonlocal frame
            game.exchange(np.array([frame, 0]), 1000.0 if frame == 0 else 1.0, terminated=frame == 20)
            frame = 0 if game.begins else frame + 1

        until(lambda: (turn(), not thread.is_alive())[1])
    assert len(totals) == 2
    assert max(totals) <= 20


@pytest.mark.filterwarnings("ignore:a round begins")
def test_the_old_round_goes_on_truly_until_the_program_reads_that_another_begins(process):
    with serve_game(OBSERVATION, ACTION, process=process, standstill=0.2) as game:
        env = joined(game)
        begin(game, env, seed=1)
        errors, told = [], []

        def reset(seed):
            try:
                told.append(env.reset(seed=seed)[0])
            except RefusedError as error:
                errors.append(str(error))
            return told

        with in_thread(lambda: reset(2)) as thread:
            until(lambda: (game.exchange(np.array([9, 9])), not thread.is_alive())[1])
        assert "has not read game.begins" in errors[0]
        # Until it has called, who asks is still told so.
        with in_thread(lambda: until(lambda: reset(3))) as thread:
            until(lambda: (game.exchange(AT_START), game.begins, not thread.is_alive())[2])
        np.testing.assert_array_equal(told, [AT_START], "nothing of the old round")
        env.close()


@pytest.mark.parametrize("seed", [None, 4])
def test_a_reset_after_an_end_enters_the_round_that_has_begun_by_itself_but_with_a_seed_begins_one(process, seed):
    with walking(False, length=60, process=process) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=1)
        until(lambda: (1, None) in walk.begun)

        def rounds():
            """Play three of them; return how many began, and how many of them by the reset."""
            before = len(walk.begun)
            for _ in range(3):
                # Of a client that is too far behind the round is cut: it ends truncated.
                while not any(env.step(1)[2:4]):
                    pass
                env.reset(seed=seed)
            return len(walk.begun) - before, sum(begun == (seed, None) for begun in walk.begun[before:])

        # After each end one begins by itself; a client without time for a second misses some.
        until(lambda: rounds() == (3 if seed is None else 6, 3))
        before = len(walk.begun)
        env.reset()  # in the midst of a round it asks for another one
        until(lambda: len(walk.begun) > before)
        env.close()


def test_a_reset_after_several_ends_enters_the_round_of_which_no_frame_has_passed(process):
    with serve_game(OBSERVATION, ACTION, process=process) as game:
        env, watcher = joined(game), make_remote(game.url, role="spectator", wait="now")
        begin(game, env)
        for number in range(1, 4):
            game.exchange(np.array([number, 9]), terminated=True)
            assert game.begins
            game.exchange(np.array([number, 0]))
        # The server has read that the third has begun.
        until(lambda: (watcher.reset()[0] == [3, 0]).all())
        until(lambda: env.step(1)[2])
        np.testing.assert_array_equal(env.reset()[0], [3, 0])
        game.exchange(np.array([3, 1]))
        assert not game.begins
        # Nor is the next round, which begins by itself, begun twice.
        game.exchange(np.array([3, 2]), terminated=True)
        begun = []
        for frame in range(30):
            begun.append(game.begins)
            game.exchange(np.array([4, frame]))
            watcher.reset()  # the server has read the frames before
        assert begun == [True] + [False] * 29
        watcher.close()
        env.close()
