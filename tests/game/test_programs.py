"""Programs of other kinds than the example: with asyncio, with menus, at 200 Hz, with agents that leave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bridge import make_remote, serve_game
from bridge.errors import ClosedError, ConcurrentUseError, RefusedError, ResetNeededError
from tests.game.loops import ACTION, OBSERVATION, in_thread, walking
from tests.support import until

AT_START = np.zeros(2, np.float32)


def test_a_program_with_asyncio_exchanges_in_one_of_its_tasks_while_others_run(process):
    others, steps = [0], []

    async def frames(game, over):
        position = 0.0
        while not over.is_set():
            action = game.exchange(np.array([0, position], np.float32))
            position = 0.0 if game.begins else position + action
            await asyncio.sleep(0.002)

    async def count(over):
        while not over.is_set():
            others[0] += 1
            await asyncio.sleep(0)

    def play(url):
        env = make_remote(url)
        env.reset(seed=1)
        until(lambda: (steps.append(float(env.step(1)[0][1])), steps[-1] >= 5)[1])
        env.close()

    async def main():
        with serve_game(OBSERVATION, ACTION, process=process) as game:
            over = asyncio.Event()
            tasks = [asyncio.create_task(frames(game, over)), asyncio.create_task(count(over))]
            await asyncio.to_thread(play, game.url)
            over.set()
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert steps == sorted(steps)
    assert others[0] > 10


def test_a_program_with_asyncio_waits_in_threads_that_take_turns(process):
    """`asyncio.to_thread` takes any thread that is free; here the threads are two, one after the other."""
    seen, threads = [], [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]

    def play(url):
        env = make_remote(url)
        env.reset(seed=1)
        seen.extend(float(env.step(1)[0][1]) for _ in range(20))
        env.close()

    async def main():
        with serve_game(OBSERVATION, ACTION, process=process) as game:

            def exchange(position):
                threads.reverse()
                return game.exchange(np.array([0, position], np.float32), wait=True)

            position, player = 0, asyncio.create_task(asyncio.to_thread(play, game.url))
            while len(seen) < 20:
                waits = asyncio.get_running_loop().run_in_executor(threads[0], exchange, position)
                await asyncio.wait([waits, player], return_when=asyncio.FIRST_COMPLETED)
                if not waits.done():  # the agent has left
                    waits.cancel()
                    break
                position = 0 if game.begins else position + int(waits.result())
            # Nobody can cancel a thread.
            with pytest.raises(ConcurrentUseError, match="another thread was in it"):
                game.exchange(np.zeros(2, np.float32), wait=True)
            game.close()
            await player

    asyncio.run(main())
    assert seen == [*range(1, 21)]
    for thread in threads:
        thread.shutdown()


def test_a_game_in_its_menu_refuses_steps_and_is_played_on_after_it(process):
    """A pygame loop calls `exchange` while it plays, and nothing in its menus."""
    menu, over, frames = threading.Event(), threading.Event(), [0]

    def loop(game):
        with contextlib.suppress(ClosedError):
            while not over.is_set():
                if not menu.is_set():
                    game.exchange(np.array([frames[0], 0], np.float32))
                    frames[0] = 0 if game.begins else frames[0] + 1
                over.wait(0.005)

    with (
        serve_game(OBSERVATION, ACTION, process=process, standstill=0.2) as game,
        in_thread(lambda: loop(game)),
    ):
        try:
            env = make_remote(game.url)
            env.reset()
            env.step(1)
            menu.set()
            refused = []

            def step():
                try:
                    return env.step(1)
                except RefusedError as error:
                    refused.append(str(error))
                except ResetNeededError:
                    with contextlib.suppress(RefusedError):
                        env.reset()
                return None

            until(lambda: (step(), refused)[1])
            assert "the game stands still" in refused[0]
            menu.clear()
            until(step)
            env.close()
        finally:
            over.set()


def test_a_control_loop_at_200_hz_takes_each_command_of_its_agent(process):
    with walking(False, process=process, pause=0.005) as walk:
        env = make_remote(walk.game.url)
        env.reset(seed=0)
        for action in (1, 2, 3, 4):
            env.step(action)
            until(lambda action=action: walk.taken[-1] == action)
        env.close()
        until(lambda: walk.taken[-1] == 0)


def test_an_agent_that_comes_again_plays_the_round_that_its_reset_begins(process):
    with walking(False, process=process) as walk:
        for seed in range(3):
            env = make_remote(walk.game.url)
            env.reset(seed=seed)
            env.step(1)
            env.close()
        assert [seed for seed, _ in walk.begun if seed is not None] == [0, 1, 2]


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("wait", [False, True])
def test_signals_stay_the_programs_and_wake_its_own_loop(process, wait):
    """Loops of Qt, GTK and asyncio hear of signals by `set_wakeup_fd`."""
    of_program = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)
    handlers, threads = {name: signal.getsignal(name) for name in of_program}, []
    read, write = os.pipe()
    os.set_blocking(write, False)
    wakes = signal.set_wakeup_fd(write)
    handler = signal.signal(signal.SIGALRM, lambda *given: threads.append(threading.current_thread()))
    try:
        with serve_game(OBSERVATION, ACTION, process=process, timeout=0.1) as game:
            found = []
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)

            def play():
                env = make_remote(game.url)
                env.reset()
                found.append(env)

            def turn():
                game.exchange(AT_START, wait=wait)
                return game.begins

            with in_thread(play):
                until(lambda: (turn(), found and len(threads) > 5)[1])
            signal.setitimer(signal.ITIMER_REAL, 0)
            found[0].close()
            assert {name: signal.getsignal(name) for name in of_program} == handlers
        assert set(threads) == {threading.main_thread()}
        assert signal.SIGALRM in os.read(read, 100)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        assert signal.set_wakeup_fd(wakes) == write
        os.close(read)
        os.close(write)


def test_a_server_answers_others_while_its_program_does_not_call(process):
    with serve_game(OBSERVATION, ACTION, process=process, web=True) as game:
        found = []
        with in_thread(lambda: found.append(make_remote(game.url))):
            until(lambda: found or (game.exchange(AT_START), game.begins, False)[2])
        # No call from here on.
        with urllib.request.urlopen(game.web_url, timeout=20) as page:
            assert page.status == 200
        assert game.server.status()["connections"] >= 1
        watcher = make_remote(game.url + "?world=", role="spectator")
        watcher.close()
        found[0].close()
