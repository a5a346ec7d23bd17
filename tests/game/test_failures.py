"""A program that hangs, is stopped, or is killed: its clients get what docs/limits.md says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from bridge import make_remote
from bridge.errors import ConnectionLostError, RefusedError, RemoteTimeoutError
from tests.game.loops import in_thread, walking
from tests.support import until

PROGRAM = """
import sys, time
import numpy as np
from gymnasium import spaces
from bridge import serve_game
wait, hangs, process = sys.argv[1] == "wait", sys.argv[2] == "hangs", sys.argv[3] == "process"
observed, standstill = spaces.Box(-9, 9, (1,), np.float32), float(sys.argv[4])
with serve_game(observed, spaces.Discrete(2), standstill=standstill, process=process) as game:
    print(game.url, flush=True)
    while True:
        action = game.exchange([0.0], wait=wait)
        if not game.begins and hangs and action == 1:
            while True:
                pass
        time.sleep(0.0 if wait else 0.01)
"""


@contextmanager
def playing(process, wait, hangs=False, standstill=0.3):
    """Run the program, and reset it; give the environment and the process."""
    words = [
        "wait" if wait else "runs",
        "hangs" if hangs else "goes",
        "process" if process else "threads",
        str(standstill),
    ]
    command = [sys.executable, "-c", PROGRAM, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as game:
        env = make_remote(game.stdout.readline().strip(), timeout=3)
        try:
            env.reset()
            yield env, game
        finally:
            env.close()
            game.kill()


def failure(env):
    """Step until that fails; return why."""
    found = []

    def fails():
        try:
            env.step(1)
        except Exception as error:
            found.append(error)
        return found

    until(fails, 60)
    return found[0]


@pytest.mark.parametrize("wait", [False, True])
def test_who_plays_a_program_that_hangs_is_refused_and_told_why(process, wait):
    with playing(process, wait, hangs=True) as (env, _):
        error = failure(env)
        assert isinstance(error, RefusedError)
        assert "the game stands still" in str(error)


@pytest.mark.parametrize("wait", [False, True])
def test_who_plays_a_program_that_is_killed_has_lost_the_connection(process, wait):
    with playing(process, wait) as (env, game):
        env.step(1)
        game.kill()
        error = failure(env)
        # A server in a process of its own may still say so to a Step that waits.
        said = process and "the game's program has ended without closing the game" in str(error)
        assert said or isinstance(error, ConnectionLostError)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_who_plays_a_program_that_is_stopped_gets_no_answer_within_the_timeout():
    with playing(False, True) as (env, game):
        env.step(1)
        os.kill(game.pid, signal.SIGSTOP)
        try:
            assert isinstance(failure(env), RemoteTimeoutError | ConnectionLostError)
        finally:
            os.kill(game.pid, signal.SIGCONT)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
@pytest.mark.parametrize("wait", [False, True])
def test_a_server_in_a_process_of_its_own_tells_that_its_program_was_stopped(wait):
    with playing(True, wait) as (env, game):
        env.step(0)
        os.kill(game.pid, signal.SIGSTOP)
        try:
            error = failure(env)
            assert isinstance(error, RefusedError)
            assert "the game stands still" in str(error)
        finally:
            os.kill(game.pid, signal.SIGCONT)


def step_while_stopped(env, pid, seconds=0.5):
    """Step while a process is stopped for longer than its `standstill`; return what the Step has told once it runs."""
    told = []
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with in_thread(lambda: told.append(env.step(0))):
        try:
            until(lambda: time.monotonic() - began > seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
    return told


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.slow
def test_a_program_that_was_stopped_with_its_server_answers_what_came_meanwhile(wait):
    # A second, in which a program calls that goes on while the machine is busy.
    with playing(False, wait, standstill=1.0) as (env, program):
        for _ in range(2):
            assert step_while_stopped(env, program.pid, 1.3), "the Step was refused"


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
@pytest.mark.slow
def test_a_server_that_was_stopped_while_its_program_went_on_answers_what_came_meanwhile():
    with walking(False, process=True, standstill=0.3) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=1)
        for _ in range(5):
            calls = len(walk.taken)
            assert step_while_stopped(env, walk.game.server.pid), "the Step was refused"
            assert len(walk.taken) > calls
        env.close()
