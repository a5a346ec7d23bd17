"""What is passed wrongly is said where it is passed; what a program does wrong its clients are told."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import RealTime, make_remote, serve_game
from bridge.errors import ClosedError, ConcurrentUseError, RefusedError, ResetNeededError, SettingError
from tests.game.loops import ACTION, OBSERVATION, in_thread, walking
from tests.support import until

AT_START = np.zeros(2, np.float32)
LOOP: dict[str, object] = {}
LOOP["itself"] = LOOP


@pytest.fixture
def game():
    """A game in its first round."""
    with serve_game(OBSERVATION, ACTION) as made:
        made.exchange(AT_START)
        assert made.begins
        made.exchange(AT_START)
        yield made


@pytest.mark.parametrize(
    ("passed", "text"),
    [
        ({"observation": np.zeros(3)}, r"expected the shape \(2,\), got \(3,\)"),
        ({"observation": "left"}, "expected observation in Box"),
        ({"observation": None}, "expected observation"),
        ({"observation": np.zeros(2, np.complex64)}, "got an array of complex64"),
        ({"reward": "much"}, "reward to be a number"),
        ({"reward": "1"}, "reward to be a number, got '1'"),
        ({"reward": b"1"}, "reward to be a number"),
        ({"reward": np.array("1")}, "reward to be a number"),
        ({"reward": np.zeros(2)}, "reward to be a number"),
        ({"reward": None}, "reward to be a number"),
        ({"reward": 1j}, "reward to be a number"),
        ({"terminated": None}, "terminated and truncated to be True or False, got None"),
        ({"terminated": "no"}, "terminated and truncated to be True or False, got 'no'"),
        ({"truncated": np.array([True])}, "terminated and truncated to be True or False"),
        ({"info": [1]}, "info to be a dict"),
        ({"info": LOOP}, "got one that contains itself"),
        ({"frame": np.zeros((4, 4), np.uint8)}, r"uint8 \(height, width, 3\)"),
        ({"frame": np.zeros((4, 4, 3))}, "got float64"),
        ({"frame": np.zeros((0, 0, 3), np.uint8)}, r"got uint8 \(0, 0, 3\)"),  # a window that is minimized
        ({"frame": np.zeros((4, 4, 4), np.uint8)}, r"got uint8 \(4, 4, 4\)"),
        ({"frame": [[1, 2], [3]]}, "uint8"),
        ({"wait": True}, "wait=False in each call"),
    ],
)
def test_what_is_no_element_is_refused_and_nothing_has_changed(game, passed, text):
    with pytest.raises(SettingError, match=text):
        game.exchange(**{"observation": AT_START, **passed})
    assert game.exchange(AT_START) == 0
    assert not game.begins


def test_a_surface_of_pygame_as_the_frame_is_told_how_its_pixels_are_read(game):
    pygame = pytest.importorskip("pygame")
    surface = pygame.Surface((6, 4))
    with pytest.raises(SettingError, match=r"got <Surface.*pygame\.surfarray\.array3d\(surface\)\.swapaxes\(0, 1\)$"):
        game.exchange(AT_START, frame=surface)
    assert game.exchange(AT_START, frame=pygame.surfarray.array3d(surface).swapaxes(0, 1)) == 0


@pytest.mark.parametrize(
    ("space", "given", "wrong"),
    [
        (spaces.Discrete(3), 2, 3),
        (spaces.Box(-128, 127, (1,), np.int8), [100], [300]),
        (spaces.Box(-9, 9, (2,), np.int16), np.array([1, 2], np.int64), np.array([1, 70_000], np.int64)),
        (spaces.Box(0, 255, (2, 2, 3), np.uint8), [[[0] * 3] * 2] * 2, [[[0.5] * 3] * 2] * 2),
        (spaces.Dict(a=spaces.Box(-1, 1, (1,)), b=spaces.Discrete(2)), {"a": [0.5], "b": 1}, {"a": [0.5]}),
        (spaces.Dict(a=spaces.Discrete(2)), {"a": 1}, {"a": 1, "b": 1}),
        (spaces.MultiDiscrete([2, 3]), [1, 2], [1, 3]),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,))]), (1, [0, 1]), (1, [0, 1, 2])),
        (spaces.Text(3), "abc", "abcd"),
    ],
)
def test_every_space_takes_its_elements_alone(space, given, wrong):
    with serve_game(space, ACTION) as game:
        with pytest.raises(SettingError):
            game.exchange(wrong)
        assert game.exchange(given) is None


def test_a_scalar_is_no_vector_of_one_element():
    with serve_game(spaces.Box(-1, 1, (1,)), ACTION) as game:
        with pytest.raises(SettingError, match=r"expected the shape \(1,\), got \(\)"):
            game.exchange(0.5)
        assert game.exchange([0.5]) is None


@pytest.mark.parametrize(
    "passed",
    [
        {"observation": np.zeros(2, np.float64)},
        {"observation": np.arange(4, dtype=np.float32)[::-2]},
        {"observation": (0, 1)},
        {"reward": np.float16(1)},
        {"reward": np.int8(1)},
        {"reward": np.array(2.0)},
        {"reward": np.ones(1)},
        {"reward": float("inf")},
        {"reward": True},
        {"terminated": np.bool_(False), "truncated": 0},
        {"frame": np.zeros((4, 6, 3), np.uint8)[::-1, ::-2]},
        {"frame": np.broadcast_to(np.uint8(7), (4, 6, 3))},  # read-only
        {"frame": memoryview(np.zeros((4, 6, 3), np.uint8))},
        {"info": {1: 2, "when": np.datetime64("2026-01-01"), "lock": threading.Lock()}},
    ],
)
def test_what_can_be_read_is_taken(game, passed):
    assert game.exchange(**{"observation": AT_START, **passed}) == 0


class Own:
    """What an info may have that no other process knows."""


def test_what_of_an_info_cannot_travel_is_left_out_and_its_client_told(process):
    info = {"lock": threading.Lock(), "own": Own(), "level": 3}
    with serve_game(OBSERVATION, ACTION, process=process) as game:
        told, over = [], threading.Event()

        def play():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                env = make_remote(game.url)
                env.reset()
                until(lambda: env.step(1)[4].get("level") == 3)
                env.close()
            told.extend(str(warning.message) for warning in caught)
            over.set()

        with in_thread(play):
            until(lambda: (game.exchange(AT_START, info=info), game.begins, over.is_set())[2])
        assert any("lock" in text for text in told), told


def test_a_reward_that_is_no_number_arrives_as_it_is(process):
    with serve_game(OBSERVATION, ACTION, process=process) as game:
        rewards = []

        def play():
            env = make_remote(game.url)
            env.reset()
            until(lambda: (rewards.append(env.step(1)[1]), np.isnan(rewards[-1]))[1])
            until(lambda: (rewards.append(env.step(1)[1]), rewards[-1] > 0)[1])
            env.close()

        def turn():
            game.exchange(AT_START, np.nan if next(frames) % 50 == 0 else 1.0)
            assert game.begins in (True, False), "read, so that rounds begin"

        frames = itertools.count()
        with in_thread(play) as thread:
            until(lambda: (turn(), not thread.is_alive())[1])
        assert np.isnan(rewards).any()


def test_what_is_passed_is_copied(game):
    seen, info = np.ones(2, np.float32), {"items": [1]}
    found = []
    with in_thread(lambda: found.append(make_remote(game.url, role="spectator"))):
        until(lambda: found or (game.exchange(AT_START), False)[1])
    env, told = found[0], []
    with in_thread(lambda: told.append(env.reset())):
        until(lambda: told or (game.exchange(AT_START), False)[1])
    game.exchange(seen, info=info)
    seen[:] = 7
    info["items"].append(2)
    until(lambda: (told.append(env.step(0)), told[-1][4].get("items"))[1])
    np.testing.assert_array_equal(told[-1][0], [1, 1])
    assert told[-1][4]["items"] == [1]
    env.close()


def test_a_second_thread_is_refused(game):
    problems = []

    def call():
        try:
            game.exchange(AT_START)
        except ConcurrentUseError as error:
            problems.append(error)

    with in_thread(call):
        pass
    assert "two threads" in str(problems[0])
    assert game.exchange(AT_START) == 0


def test_a_thread_goes_on_after_one_that_has_ended():
    """Each `threading.Timer` is a thread of its own."""
    frames, over = [], threading.Event()

    def frame():
        earlier.append(threading.current_thread())
        if len(earlier) > 1:
            earlier[-2].join()
        frames.append(game.exchange(AT_START))
        if game.begins and len(frames) > 1:
            frames.append("begins")
        over.set() if len(frames) == 5 else threading.Timer(0, frame).start()

    earlier = []
    with serve_game(OBSERVATION, ACTION) as game:
        threading.Timer(0, frame).start()
        assert over.wait(30)
    assert frames == [None, 0, 0, 0, 0]


def test_a_round_ends_once(game):
    assert game.exchange(AT_START, terminated=True) is None
    with pytest.raises(SettingError, match="passed twice"):
        game.exchange(AT_START, terminated=True)  # without a look at `begins`
    assert game.begins
    with pytest.raises(SettingError, match="passed twice"):
        game.exchange(AT_START, truncated=True)  # it would be the first observation of the next round
    assert game.exchange(AT_START) == 0


def test_a_program_that_never_looks_whether_a_round_begins_is_told_so_itself(game):
    assert game.exchange(AT_START, terminated=True) is None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        until(lambda: (game.exchange(AT_START), told)[1])
        assert "expected it to read game.begins" in str(told[0].message)
        assert told[0].filename.endswith("test_mistakes.py")
    assert game.begins
    assert game.exchange(AT_START) == 0


@pytest.mark.filterwarnings("ignore:a round begins")
@pytest.mark.parametrize("wait", [False, True])
def test_a_program_that_ignores_a_round_is_told_to_its_clients(process, wait):
    with serve_game(OBSERVATION, ACTION, process=process, standstill=0.2) as game:
        if not wait:
            game.exchange(AT_START)
            assert game.begins
        errors = []

        def join():
            env = make_remote(game.url)
            try:
                env.reset(seed=1)
            except RefusedError as error:
                errors.append(error)
            env.close()

        with in_thread(join) as thread:
            until(lambda: (game.exchange(AT_START, wait=wait), not thread.is_alive())[1])
        assert "has not read game.begins" in str(errors[0])
        assert "serve_game(standstill=…)" in str(errors[0])
        assert game.begins, "it may begin it still"
        assert game.seed == 1


@pytest.mark.parametrize("wait", [False, True])
def test_agents_hear_that_a_game_stands_still_and_play_on_when_it_goes_on(process, wait):
    goes, over = threading.Event(), threading.Event()
    goes.set()

    def loop(game):
        with contextlib.suppress(ClosedError):
            while not over.is_set():
                game.exchange(AT_START, wait=wait)
                assert game.begins in (True, False)
                goes.wait(20)
                over.wait(0.0 if wait else 0.005)

    with serve_game(OBSERVATION, ACTION, process=process, standstill=0.2) as game, in_thread(lambda: loop(game)):
        env = make_remote(game.url)
        try:
            env.reset()
            goes.clear()
            until(lambda: "the game stands still" in refusal(env))
            goes.set()
            until(lambda: not refusal(env))
        finally:
            over.set()
            goes.set()
            game.close()
            env.close()


def refusal(env):
    """Step, after a reset where the client needs one; return why that is refused, or an empty text."""
    try:
        try:
            env.step(1)
        except ResetNeededError:
            env.reset()
    except RefusedError as error:
        return str(error)
    return ""


def test_after_close_a_call_says_so_and_so_does_one_that_waits(process):
    game = serve_game(OBSERVATION, ACTION, process=process)
    game.exchange(AT_START)
    game.close()
    game.close()
    with pytest.raises(ClosedError, match="this game was closed"):
        game.exchange(AT_START)
    with walking(True, process=process) as walk:  # waits for somebody
        until(lambda: not walk.taken)
        walk.game.close()
        with pytest.raises(ClosedError):
            walk.game.exchange(AT_START, wait=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_that_the_game_is_of_its_parent(process):
    with serve_game(OBSERVATION, ACTION, process=process) as game:
        assert game.exchange(AT_START) is None
        read, write = os.pipe()
        forked = os.fork()
        if not forked:
            try:
                game.close()  # nothing
                game.exchange(AT_START)
            except ClosedError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read, "rb") as file:
            assert b"belongs to the parent process" in file.read()
        os.waitpid(forked, 0)
        assert game.begins
        assert game.exchange(AT_START) == 0, "it goes on here"


def test_a_server_that_stops_ends_the_game():
    game = serve_game(OBSERVATION, ACTION)
    game.server.stop()
    with pytest.raises(ClosedError):
        game.exchange(AT_START)


@pytest.mark.parametrize("wait", [False, True])
def test_an_exception_of_the_loop_ends_the_episode_with_its_text(process, wait):
    errors, ready, fails = [], threading.Event(), threading.Event()
    games = []

    def program():
        try:
            with serve_game(OBSERVATION, ACTION, process=process) as game:
                games.append(game)
                ready.set()
                while True:
                    game.exchange(AT_START, wait=wait)
                    if not game.begins and fails.is_set():
                        raise ValueError("the dragon has escaped")
        except ValueError as error:
            errors.append(error)

    with in_thread(program):
        ready.wait(10)
        env = make_remote(games[0].url)
        env.reset()
        fails.set()
        found = []
        until(lambda: (found.append(refusal(env)), found[-1])[1])
        assert "the dragon has escaped" in found[-1]
        env.close()
    assert len(errors) == 1


@pytest.mark.parametrize(
    "keywords",
    [
        {"action_space": None},
        {"observation_space": 3},
        {"default_action": 9},
        {"timeout": 0},
        {"standstill": None},
        {"standstill": -1},
        {"fps": 30},
        {"env_kwargs": {}},
        {"isolation": "process"},
        {"states": None},
        {"agents": "random"},
        {"dial_name": "x"},
        {"realtime": RealTime(clock=object())},
        {"observation_space": {}},
        {"observation_space": {"red": OBSERVATION}, "action_space": None},
        {"observation_space": {"red": (OBSERVATION, ACTION)}},
        {"observation_space": {"red": (OBSERVATION, ACTION)}, "action_space": None, "default_action": {"blue": 0}},
    ],
)
def test_what_cannot_be_served_is_refused_at_once(keywords):
    given = {"observation_space": OBSERVATION, "action_space": ACTION, **keywords}
    with pytest.raises(SettingError):
        serve_game(**given)


def test_a_space_that_does_not_travel_is_refused_at_once():
    class Own(gymnasium.Space):
        def __init__(self):
            super().__init__((1,), np.float32)

    with pytest.raises(SettingError, match="cannot be sent to clients"):
        serve_game(Own(), ACTION)
