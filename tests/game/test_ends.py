"""A wait of the program's thread ends with what ends the game, and nothing of the game is left."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from bridge import make_remote, serve_game
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import BridgeError, ClosedError, ConcurrentUseError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.recording.reader import read_folder
from tests.game.loops import ACTION, OBSERVATION, in_thread, walking
from tests.peers import Stream
from tests.support import sampled, until

AT_START = np.zeros(2, np.float32)
PROGRAM = """
import sys
import numpy as np
from gymnasium import spaces
from bridge import serve_game
if __name__ == "__main__":
    process, block, folder = sys.argv[1] == "process", sys.argv[2] == "block", sys.argv[3]
    game = serve_game(spaces.Box(-9, 9, (1,), np.float32), spaces.Discrete(2), process=process, record=folder)
    print(game.url, getattr(game.server, "pid", 0) if process else 0, flush=True)

    def loop():
        while True:
            action = game.exchange([0.0], wait=True)
            if not game.begins and action == 1:
                print("waits", flush=True)

    try:
        if block:
            with game:
                loop()
        else:
            loop()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def hears_the_end(env):
    """Step; return whether the agent is told that its episode has ended."""
    try:
        _, _, terminated, truncated, _ = env.step(1)
    except BridgeError:
        return True
    return terminated or truncated


@pytest.mark.parametrize("begun", [False, True])
def test_close_by_another_thread_ends_a_wait_at_once(process, begun):
    with serve_game(OBSERVATION, ACTION, process=process, timeout=None) as game:
        found, frames = [], []

        def loop():
            try:
                while True:
                    frames.append(game.exchange(AT_START, wait=True))
                    assert game.begins in (True, False)
            except ClosedError as error:
                found.append(error)

        with in_thread(loop):
            if begun:
                env = make_remote(game.url)
                env.reset()
                env.step(1)
            game.close()
        assert "this game was closed" in str(found[0])
        if begun:
            until(lambda: hears_the_end(env))
            env.close()


PAIR = (OBSERVATION, ACTION)


@contextlib.contextmanager
def playing_in_real_time(folder, agents, **keywords):
    """Have a game run whose agents have stepped; give it, their environments and what it passes last, and close it."""
    spaces = [dict.fromkeys(agents, PAIR)] if agents else PAIR
    game, envs, held = serve_game(*spaces, record=folder, **keywords), [], []

    def exchange(number):
        seen, info = np.array([number, 0], np.float32), {"passed": number}
        of_each = [dict.fromkeys(agents, one) if agents else one for one in (seen, info)]
        game.exchange(of_each[0], 1.0, info=of_each[1])
        return game.begins

    def begin():
        envs.extend(make_remote(game.url, **named) for named in ([{"agent": name} for name in agents] or [{}]))
        with contextlib.ExitStack() as stack:  # of several agents the round begins once all have asked
            for env in envs:
                stack.enter_context(in_thread(env.reset))
        for env in envs:
            env.step(1)
        held.append(True)

    with in_thread(begin):
        until(lambda: (exchange(1), bool(held))[1])
    try:
        yield game, envs, exchange
    finally:
        game.close()
        for env in envs:
            env.close()


@pytest.mark.parametrize("agents", [(), ("red", "blue")], ids=["one", "two"])
def test_who_steps_after_the_end_of_a_game_in_real_time_is_told_its_last_observation(process, agents, tmp_path):
    """No Step is under way when it is closed, and the next ones come while `close` waits for them."""
    with playing_in_real_time(tmp_path, agents, process=process) as (game, envs, exchange):
        exchange(7)
        with in_thread(game.close):
            told = []
            for env in envs:
                for _ in range(1000):
                    seen, _, terminated, truncated, info = env.step(1)
                    if terminated or truncated:
                        told.append((seen.tolist(), info["passed"], terminated, truncated))
                        break
        assert told == [([7.0, 0.0], 7, False, True)] * len(envs)
        for env in envs:
            with pytest.raises(BridgeError, match=r"the game was closed|the connection was lost|cannot connect"):
                env.reset()
    ends = [episode.end for episode in read_folder(tmp_path).episodes()]
    assert ends[-1] == "truncated"


def test_who_steps_after_an_exception_in_the_loop_is_told_its_text(process, tmp_path):
    with playing_in_real_time(tmp_path, (), process=process) as (game, (env,), _):

        def fail():
            with contextlib.suppress(ValueError), game:
                raise ValueError("the engine is gone")

        with in_thread(fail):
            found = []
            until(lambda: found or found.extend(failures_of(env)))
    assert "ValueError in its loop: the engine is gone" in found[0]


def failures_of(env):
    """Step; return the text of the error, if there is one."""
    try:
        env.step(1)
    except BridgeError as error:
        return [str(error)]
    return []


def test_a_round_that_ends_just_before_the_game_is_told_as_terminated(process):
    with playing_in_real_time(None, (), process=process) as (game, (env,), _):
        game.exchange(AT_START + 3, 2.0, terminated=True)
        with in_thread(game.close):
            ends = []
            until(lambda: ends or ends.extend(end for end in [env.step(1)] if end[2] or end[3]))
    (seen, _, terminated, truncated, _) = ends[0]
    assert (seen.tolist(), terminated, truncated) == ([3.0, 3.0], True, False)


def test_close_waits_for_no_agent_that_is_in_no_episode_any_more(process):
    with playing_in_real_time(None, (), process=process) as (game, (env,), _):
        env.close()
        until(lambda: not game.server.connections)
        ended = threading.Event()
        with in_thread(lambda: (game.close(), ended.set())):
            assert ended.wait(20)


def test_a_person_who_plays_when_the_game_is_closed_is_told_the_end(process):
    with playing_in_real_time(None, (), process=process, web=True) as (game, (env,), exchange):
        env.close()
        until(lambda: (exchange(1), not game.server.connections)[1])
        stream = Stream(game.server, own_connection=True)
        states = []

        def play():
            stream.join("", player="person:Ann")
            while not states or states[-1] == pb.RUNNING:
                answer = stream.ask(step=pb.StepRequest(actions={1: pack_tensor(np.int64(1))}))
                states.append(answer.step.state if answer.HasField("step") else answer.error.message)

        with in_thread(play):
            until(lambda: (exchange(1), len(states) > 3)[1])
            game.close()
        stream.die()
        stream.channel.close()
    assert states[-1] == pb.INTERRUPTED


def test_threads_that_close_at_once_and_a_program_that_waits_all_end(process):
    with walking(True, process=process) as walk:
        env = make_remote(walk.game.url)
        env.reset()
        together = threading.Barrier(3)

        def close():
            together.wait(10)
            walk.game.close()

        with in_thread(close), in_thread(close):
            together.wait(10)
        env.close()


def test_a_wait_goes_on_to_its_timeout_where_the_agent_leaves_in_it(process):
    with walking(True, process=process, timeout=0.3, default_action=3) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=1)
        env.step(1)
        calls = len(walk.taken)
        env.close()
        until(lambda: len(walk.taken) > calls + 2)
        assert set(walk.taken[calls:]) == {3}
        env = make_remote(walk.game.url)
        np.testing.assert_array_equal(env.reset(seed=2)[0], [0, 0])
        env.step(1)
        env.close()
    assert [seed for seed, _ in walk.begun] == [1, 2]


def test_a_client_that_dies_in_its_step_leaves_a_program_that_goes_on(process):
    with walking(True, process=process, timeout=0.1) as walk:
        command = (
            "import sys, os; from bridge import make_remote; env = make_remote(sys.argv[1]); env.reset(seed=5); "
            "env.step(2); os._exit(0)"
        )
        subprocess.run([sys.executable, "-c", command, walk.game.url], check=True, timeout=60)
        calls = len(walk.taken)
        until(lambda: len(walk.taken) > calls + 2)
        env = make_remote(walk.game.url)
        np.testing.assert_array_equal(env.reset(seed=6)[0], [0, 0])
        env.close()
    assert [seed for seed, _ in walk.begun if seed is not None] == [5, 6]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_wait_has_its_timeout_also_where_the_server_does_not_run():
    with walking(True, process=True, timeout=0.1, default_action=3) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=1)
        env.step(1)
        os.kill(walk.game.server.pid, signal.SIGSTOP)
        try:
            calls = len(walk.taken)
            until(lambda: len(walk.taken) > calls + 1)
        finally:
            os.kill(walk.game.server.pid, signal.SIGCONT)
        np.testing.assert_array_equal(env.reset(seed=2)[0], [0, 0])
        env.step(1)
        env.close()


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_wait_that_ctrl_c_has_broken_off_goes_on_with_the_next_call(process):
    """What that one passes has come of no action: the agent is not told of it."""
    with serve_game(OBSERVATION, ACTION, process=process) as game:
        told, broken_off = [], threading.Event()

        def play():
            env = make_remote(game.url)
            env.reset(seed=1)
            os.kill(os.getpid(), signal.SIGINT)
            broken_off.wait(20)
            told.append(env.step(2)[:3])
            game.close()  # else the program would wait for the next round
            env.close()

        with in_thread(play):
            with pytest.raises(KeyboardInterrupt):
                until(lambda: (game.exchange(AT_START, wait=True), game.begins, False)[2])
            broken_off.set()
            assert game.exchange(AT_START + 1, 5.0, wait=True) == 2
            with pytest.raises(ClosedError):
                game.exchange(AT_START + 2, 1.0, terminated=True, wait=True)
    (seen, reward, terminated) = told[0]
    np.testing.assert_array_equal(seen, AT_START + 2)
    assert (reward, terminated) == (1.0, True)


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize(
    ("place", "block"), sampled(itertools.product(["threads", "process"], ["block", "alone"]), 3, slow=True)
)
def test_ctrl_c_in_a_wait_ends_the_episode_and_leaves_no_process(place, block, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    folder = tmp_path / "runs"
    command = [sys.executable, str(script), place, block, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as game:
        try:
            url, pid = game.stdout.readline().split()
            env = make_remote(url, timeout=20)
            env.reset(seed=1)
            env.step(1)
            env.step(0)
            assert game.stdout.readline() == "waits\n"
            game.send_signal(signal.SIGINT)
            out, errors = game.communicate(timeout=60)
            assert out == "interrupted\n"
            assert "Traceback" not in errors
            assert game.returncode == 0
            until(lambda: hears_the_end(env))
            env.close()
            if int(pid):
                with pytest.raises(ProcessLookupError):
                    os.kill(int(pid), 0)
        finally:
            game.kill()
    assert [episode.end for episode in read_folder(folder).episodes()] == ["closed"], "no step was under way"


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_ctrl_c_between_two_calls_is_the_programs_and_so_is_the_end(process):
    def program():
        with game:
            while True:
                game.exchange(AT_START)
                if not game.begins:
                    os.kill(os.getpid(), signal.SIGINT)

    game = serve_game(OBSERVATION, ACTION, process=process)
    with pytest.raises(KeyboardInterrupt):
        program()
    with pytest.raises(ClosedError, match="this game was closed"):
        game.exchange(AT_START)


def test_a_program_that_exits_in_the_block_has_ended_in_order(process, tmp_path):
    found = []

    def program():
        with game:
            with in_thread(lambda: found.append(make_remote(game.url))):
                until(lambda: found or (game.exchange(AT_START), game.begins, False)[2])
            with in_thread(lambda: found.append(found[0].reset())):
                until(lambda: len(found) == 2 or (game.exchange(AT_START), game.begins, False)[2])
            sys.exit(3)

    game = serve_game(OBSERVATION, ACTION, process=process, record=tmp_path)
    with pytest.raises(SystemExit):
        program()
    found[0].close()
    assert "failed" not in {episode.end for episode in read_folder(tmp_path).episodes()}


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_signal_handler_may_close_a_game_that_waits(process):
    with serve_game(OBSERVATION, ACTION, process=process) as game:
        handler = signal.signal(signal.SIGALRM, lambda *given: game.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(ClosedError, match="this game was closed"):
                game.exchange(AT_START, wait=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_signal_handler_may_close_a_game_that_is_being_closed():
    """A supervisor may send SIGTERM twice."""

    def close(*given):
        signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, 30)
        os.kill(pid, signal.SIGCONT)
        game.close()
        closed.append(game.server)

    def fail(*given):
        raise TimeoutError("close() hangs")

    closed, game = [], serve_game(OBSERVATION, ACTION, process=True)
    pid, handler = game.server.pid, signal.signal(signal.SIGALRM, close)
    try:
        os.kill(pid, signal.SIGSTOP)  # so that the first close waits for it
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        game.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        os.kill(pid, signal.SIGCONT) if not closed else None
    assert closed
    assert "stopped" in repr(game)


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_signal_handler_may_ask_the_server_while_it_is_asked():
    with serve_game(OBSERVATION, ACTION, process=True) as game:
        pid, told = game.server.pid, []

        def ask(*given):
            os.kill(pid, signal.SIGCONT)
            told.append(game.url)

        handler = signal.signal(signal.SIGALRM, ask)
        try:
            os.kill(pid, signal.SIGSTOP)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            assert game.url.startswith("grpc")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        assert told == [game.url]


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_call_within_a_call_is_refused(process):
    """A program's loop may be a timer's signal handler, which interrupts itself."""
    refused = []

    def frame(*given):
        try:
            game.exchange(AT_START, wait=True)
        except ConcurrentUseError as error:
            refused.append(error)
            game.close()

    game = serve_game(OBSERVATION, ACTION, process=process)
    handler = signal.signal(signal.SIGALRM, frame)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(ClosedError, match="this game was closed"):
            game.exchange(AT_START, wait=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert "within a call of exchange()" in str(refused[0])
