"""`python -m benchmarks.recordings`: what recordings cost, beside Minari's HDF5 and Parquet written by hand.

Bytes a step, steps read a second of processor time, and the server's processor time with and without a recording, in
turns. Processor time, not the clock: a thread that writes beside the steps hides on an idle core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.alone import add_busy, measuring
from bridge import Recording, make_remote, make_vec_remote, serve_gym
from bridge.recording.episodes import load_episode
from bridge.recording.exports import export_minari
from bridge.recording.reader import RecordedEpisode, read_folder
from bridge.wrappers import BlockingReset

SERVER = """
import sys
import ale_py
from bridge import Recording, serve_gym
env, lanes, folder, observations = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
record = Recording(folder, observations=observations) if folder else None
with serve_gym(env, num_envs=lanes, record=record) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""
PONG = "ALE/Pong-v5"


def play(url: str, lanes: int, steps: int) -> None:
    """Step a world with random actions, beginning episodes anew where they end."""
    if lanes > 1:
        envs = BlockingReset(make_vec_remote(f"{url}?world="))
        envs.action_space.seed(1)
        envs.reset(seed=1)
        for _ in range(steps):
            envs.step(envs.action_space.sample())
        envs.close()
        return
    with make_remote(url) as env:
        env.action_space.seed(1)
        env.reset(seed=1)
        for _ in range(steps):
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()


def episodes_of(env: str, lanes: int, steps: int, folder: Path) -> list[RecordedEpisode]:
    """Record a world with observations; return its episodes."""
    import ale_py  # noqa: F401 - registers Pong

    with serve_gym(env, num_envs=lanes, record=Recording(folder, observations=True)) as server:
        play(server.url, lanes, steps)
    return [episode for episode in read_folder(folder).episodes() if episode.length]


def size_of(folder: Path) -> int:
    """Return the bytes of the files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for a while, with Minari's datasets in it."""
    path = Path(tempfile.mkdtemp())
    os.environ["MINARI_DATASETS_PATH"] = str(path / "minari")
    try:
        yield path
    finally:
        shutil.rmtree(path)


def by_hand(episodes: list[RecordedEpisode], path: Path) -> None:
    """Write what a recording has of each step as columns of Parquet with zstd, as anybody would."""
    tables = []
    for number, episode in enumerate(episodes):
        data = load_episode(episode)
        seen = np.stack(data.observations[1:]).reshape(len(data.actions), -1)
        large = seen.shape[1] > 1024  # pictures as bytes, as in a recording
        observation = (
            pa.array([row.tobytes() for row in seen])
            if large
            else pa.FixedSizeListArray.from_arrays(pa.array(seen.reshape(-1)), seen.shape[1])
        )
        steps = np.arange(len(data.actions))
        tables.append(pa.table({
            "episode": np.full_like(steps, number), "t": steps, "time": episode.stream.column("time")[episode.own][1:],
            "by": data.by, "action": np.asarray(data.actions), "reward": data.rewards,
            "terminated": data.terminations, "truncated": data.truncations, "observation": observation,
        }))  # fmt: skip
    pq.write_table(pa.concat_tables(tables), path, compression="zstd")


def sizes(env: str, lanes: int, steps: int) -> None:
    """Print the bytes of a step in each format."""
    with scratch() as path:
        episodes = episodes_of(env, lanes, steps, path / "runs")
        total = sum(episode.length for episode in episodes)
        ours = size_of(path / "runs")
        by_hand(episodes, path / "hand.parquet")
        export_minari(episodes, "bench/size-v0", data_format="hdf5")
        hand, hdf5 = (path / "hand.parquet").stat().st_size, size_of(path / "minari")
        print(f"bytes a step, {env}, {lanes} lanes, {total:,} steps: "
              f"ours {ours / total:.1f}, Parquet by hand {hand / total:.1f} ({ours / hand:.2f} x), "
              f"Minari's HDF5 {hdf5 / total:.1f}", flush=True)  # fmt: skip


def rate(read: Callable[[], int]) -> float:
    """Return the steps that are read in a second of processor time: the best of three."""
    found = []
    for _ in range(3):
        began = time.process_time()
        steps = read()
        found.append(steps / (time.process_time() - began))
    return max(found)


def reading(env: str, lanes: int, steps: int) -> None:
    """Print how many steps are read a second of processor time: observations, actions, rewards and flags."""
    import minari

    with scratch() as path:
        episodes = episodes_of(env, lanes, steps, path / "runs")
        by_hand(episodes, path / "hand.parquet")
        export_minari(episodes, "bench/read-v0", data_format="hdf5")

        def ours() -> int:
            return sum(len(load_episode(episode).actions) for episode in read_folder(path / "runs").episodes()
                       if episode.length)  # fmt: skip

        def hdf5() -> int:
            return sum(len(episode) for episode in minari.load_dataset("bench/read-v0").iterate_episodes())

        def hand() -> int:
            return len(pq.read_table(path / "hand.parquet", use_threads=False).combine_chunks())

        print(f"steps read a processor second, {env}, {lanes} lanes: ours {rate(ours):,.0f}, "
              f"Minari's HDF5 {rate(hdf5):,.0f}, the table by hand {rate(hand):,.0f}", flush=True)  # fmt: skip


def server_time(env: str, lanes: int, steps: int, folder: str, observations: bool) -> float:
    """Return a server's seconds of processor time for some steps, without its start."""
    command = [sys.executable, "-c", SERVER, env, str(lanes), folder, str(observations)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        play(url, lanes, max(10, steps // 20))  # the first steps import and allocate, and so does their first batch
        time.sleep(0.5)
        before = psutil.Process(process.pid).cpu_times()
        play(url, lanes, steps)
        time.sleep(0.5)  # what is queued is written
        after = psutil.Process(process.pid).cpu_times()
        process.stdin.close()
        process.wait(60.0)
    return float(after.user + after.system - before.user - before.system)


def cost(env: str, lanes: int, steps: int, rounds: int, observations: bool) -> None:
    """Print a server's processor time with a recording, in relation to that without one, in turns."""
    ratios, plain = [], []
    for _ in range(rounds):
        with scratch() as path:
            without = server_time(env, lanes, steps, "", observations)
            ratios.append(server_time(env, lanes, steps, str(path), observations) / without)
            plain.append(without / steps / lanes * 1e6)
    kept = "observations" if observations else "hashes"
    print(f"server's time with a recording of {kept}, {env}, {lanes} lanes: {statistics.median(ratios):.2f} x "
          f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}); without {statistics.median(plain):.1f} µs a step",
          flush=True)  # fmt: skip


def main() -> None:
    """Read the options, and measure while nothing else does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    add_busy(parser)
    arguments = parser.parse_args()
    with measuring(parser, arguments.busy):
        measure(arguments.rounds)


def measure(rounds: int) -> None:
    """Measure, and print a line for each figure."""
    sizes("CartPole-v1", 1, 20_000)
    sizes("CartPole-v1", 64, 1_000)
    sizes(PONG, 1, 2_000)
    reading("CartPole-v1", 64, 2_000)
    reading("CartPole-v1", 1, 20_000)
    reading(PONG, 1, 2_000)
    cost("CartPole-v1", 64, 4_000, rounds, False)
    cost("CartPole-v1", 1, 20_000, rounds, False)
    cost("CartPole-v1", 1, 20_000, rounds, True)
    cost(PONG, 1, 3_000, rounds, True)


if __name__ == "__main__":
    main()
