"""A program that calls faster than its server reads: agents and recordings are told each frame that it has made."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bridge import make_remote, serve_game
from bridge.recording.episodes import load_episode
from bridge.recording.reader import read_folder
from tests.game.loops import ACTION, OBSERVATION, in_thread
from tests.support import sampled

FRAMES = 10_000
AGENTS = ("red", "blue")


class Sprint:
    """A game that calls without a pause for `FRAMES` frames, from the round with the seed 1 on.

    It shows how many frames it has made, and how many of them in its round. Each is worth 1 to each agent.

    Args:
        game: What `serve_game` returned.
        lengths: The frames of a round, by agent.
    """

    def __init__(self, game, lengths):
        self.game, self.lengths = game, lengths
        self.last = None
        """How many frames it will have made when it has sprinted; None: nobody has asked for the round yet."""
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.over.set()
        self._thread.join(30)

    def _run(self):
        made, frame, alive = 0, 0, set(self.lengths)
        while not self.over.is_set():
            seen = {name: np.array([made, frame], np.float32) for name in alive}
            ends = {name: frame == self.lengths[name] for name in alive}
            if len(self.lengths) == 1:
                (seen,), (ends,) = seen.values(), ends.values()
            self.game.exchange(seen, 1.0, terminated=ends)
            if self.game.begins:
                if self.last is None and self.game.seed == 1:
                    self.last = made + FRAMES
                frame, alive = 0, set(self.lengths)
                continue
            alive = {name for name in alive if frame < self.lengths[name]}
            made, frame = made + 1, frame + 1
            if self.last is None or made > self.last:
                self.over.wait(0.002)


def play(env, sprint, ends):
    """Play until the program has sprinted; return how many frames the steps have told, and how many it has made.

    Args:
        env: The agent's.
        sprint: The program.
        ends: Takes the frames of each round that was told to its end.
    """
    (made, frame), info = env.reset(seed=1)
    first, told, offset, shown, skipped = made, 0, info["latency"]["frame"] - made, 0, 0
    while made < sprint.last:
        before, seen = made, (made, frame)
        (made, frame), reward, terminated, truncated, info = env.step(1)
        assert reward == info["frames"]
        told, shown, skipped = told + info["frames"], shown + (made > before), info["latency"]["frames_skipped"]
        # A reset may return a later observation of its round, whose frames the next new observation tells of.
        assert told == frame if info["frames"] else seen == (made, frame)
        if terminated or truncated:
            ends.append(frame)
            (made, frame), info = env.reset()
            told = 0
        else:
            assert info["latency"]["frame"] - offset == made
    return shown + skipped, made - first


def numbers(episode):
    """Return the number of the frame in each row of a recorded episode."""
    return episode.stream.cells("frame_number", episode.own).to_numpy()


@pytest.mark.parametrize("length", sampled([10**9, 300, 2], 3, 1, slow=True))
def test_an_agent_is_told_each_frame_that_the_program_made_and_so_is_a_recording(process, length, tmp_path):
    ends = []
    with (
        serve_game(OBSERVATION, ACTION, process=process, record=tmp_path) as game,
        Sprint(game, {"agent": length}) as sprint,
    ):
        env = make_remote(game.url, timeout=30)
        counted, made = play(env, sprint, ends)
        env.close()
    assert len(ends) > 0 or length > FRAMES
    if length > FRAMES:
        assert counted == made, "1 + frames_skipped, over all steps"
    offsets, longest = set(), 0
    for episode in read_folder(tmp_path).episodes():
        data = load_episode(episode)
        seen, number = np.array(data.observations), numbers(episode)
        offsets.update((number - seen[:, 0]).tolist())
        np.testing.assert_array_equal(np.diff(number), np.diff(seen[:, 1]))
        np.testing.assert_array_equal(data.rewards, np.diff(number))
        longest = max(longest, np.diff(number).max(initial=0))
    assert len(offsets) == 1, "the recording's frames are the program's"
    assert longest > 1, "some were put together"


def test_each_of_several_agents_is_told_the_frames_that_it_was_in(process, tmp_path):
    ends = {name: [] for name in AGENTS}
    lengths = {"red": 500, "blue": 200}
    with (
        serve_game(dict.fromkeys(AGENTS, (OBSERVATION, ACTION)), process=process, record=tmp_path) as game,
        Sprint(game, lengths),
    ):
        envs = {name: make_remote(game.url, agent=name, timeout=30) for name in AGENTS}
        found = []

        def run(name):
            env = envs[name]
            env.reset(seed=1 if name == "red" else None)
            while len(ends[name]) < 3:
                told, terminated, truncated = 0, False, False
                while not (terminated or truncated):
                    (_, frame), reward, terminated, truncated, info = env.step(1)
                    assert reward == info["frames"]
                    told += info["frames"]
                assert told == frame
                if terminated:  # else the server was too far behind to tell the end
                    ends[name].append(frame)
                env.reset()
            found.append(name)

        with in_thread(lambda: run("red")), in_thread(lambda: run("blue")):
            pass
        for env in envs.values():
            env.close()
    assert sorted(found) == sorted(AGENTS)
    for name in AGENTS:
        assert ends[name] == [lengths[name]] * 3
