"""Programs of other kinds than the example: with asyncio, with menus, at 200 Hz, with agents that leave."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np

from bridge import make_remote, serve_game
from bridge.errors import ClosedError, RefusedError, ResetNeededError
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
        steps.extend(float(env.step(1)[0][1]) for _ in range(10))
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
    assert steps[-1] > 0
    assert others[0] > 10


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
