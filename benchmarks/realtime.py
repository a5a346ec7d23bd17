"""`python -m benchmarks.realtime`: does a real-time world keep its rate while its neighbours misbehave?

One server process, four agents, each with a world of its own at 60 fps. One agent plays steadily, one thinks for 2 s
again and again, one is killed in the midst, and one's environment takes 5 s for every reset. Then the price of the
diagnostics, switched on and off in turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.alone import add_busy, measuring
from bridge import RemoteVectorEnv, make_vec_remote, serve_gym
from bridge.core.encoding.tensors import unpack_tensor
from bridge.testing import CountingEnv, Inspector

EPISODE = 600
"""Frames; 10 s."""


class Game(CountingEnv):
    """Episodes of 10 s at 60 fps whose return tells whether each frame was counted once; a slow one resets in 5 s."""

    def __init__(self, reset_seconds: float = 0.0, work: float = 0.0) -> None:
        super().__init__(EPISODE)
        self.reset_seconds, self.work = reset_seconds, work

    def reset(self, **more: Any) -> Any:
        time.sleep(self.reset_seconds)
        return super().reset(**more)

    def step(self, action: Any) -> Any:
        end = time.perf_counter() + self.work  # a game that computes
        while time.perf_counter() < end:
            pass
        return super().step(action)


@contextmanager
def server_process(fps: float, shared_lock: bool) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.realtime", "--serve", str(fps)]
    with subprocess.Popen(
        command + ["--shared-lock"] * shared_lock, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if process.stdout is None or process.stdin is None:
            raise RuntimeError("the server has no pipes")
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(20.0)


def serve(fps: float, shared_lock: bool) -> None:
    with serve_gym(Game, fps=fps, thread_safe=not shared_lock) as server:
        print(server.url, flush=True)
        sys.stdin.read()


def play(url: str, seconds: float, think: float = 0.0, env_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Act 60 times a second; with `think`, stop for so long every 10 s. Return what was seen."""
    envs: RemoteVectorEnv = make_vec_remote(url, env_kwargs=env_kwargs)
    envs.reset(seed=0)
    records: list[dict[str, Any]] = []
    first = last = None
    start = time.monotonic()
    next_thought = start + 5.0
    steps = nones = 0
    most_skipped = 0
    while (now := time.monotonic()) < start + seconds:
        rows, _, _, _, infos = envs.step(np.zeros(1, np.int64))
        steps += 1
        nones += rows[0] is None
        records += [record for own in infos.get("episodes", ()) for record in own or ()]
        if "latency" in infos:
            frame = int(infos["latency"]["frame"][0])
            last = (time.monotonic(), frame)
            first = first or last
            most_skipped = max(most_skipped, int(infos["frames"][0]))
        if think and now > next_thought:
            next_thought = now + 10.0
            time.sleep(think)
        time.sleep(max(0.0, 1 / 60 - (time.monotonic() - now)))
    latency = {name: value for name, value in envs.latency_summary()[0].items() if name != "url"}
    ((_, server),) = envs._slots.read_property("world.realtime")
    envs.close()
    if first is None or last is None:
        raise RuntimeError("no frame was seen")
    elapsed, frames = last[0] - first[0], last[1] - first[1]
    whole = sum(range(EPISODE + 1))
    return {
        "seconds": round(elapsed, 3),
        "frames": frames,
        "rate": round(frames / elapsed, 3),
        "steps": steps,
        "none": nones,
        "most frames in a step": most_skipped,
        "episodes": len(records),
        "episodes intact": all(
            record["length"] == EPISODE and record["return"] == whole and record["terminated"] for record in records
        )
        and [record["episode"] for record in records] == list(range(1, len(records) + 1)),
        "round trip": latency["round_trip"],
        "observation age": latency["observation_age"],
        "overruns": server["overruns"],
        "frames dropped": server["frames_dropped"],
        "lateness": server["lateness"],
    }


def four_agents(seconds: float, fps: float, shared_lock: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with server_process(fps, shared_lock) as url, context.Pool(3) as pool:
        victim = context.Process(target=play, args=(url, 10 * seconds))
        victim.start()
        steady = pool.apply_async(play, (url, seconds))
        thinking = pool.apply_async(play, (url, seconds, 2.0))
        slow = pool.apply_async(play, (url, seconds, 0.0, {"reset_seconds": 5.0}))
        killer = threading.Timer(seconds / 2, victim.kill)
        killer.start()
        found = {
            "steady": steady.get(seconds + 60),
            "thinks 2 s": thinking.get(seconds + 60),
            "resets in 5 s": slow.get(seconds + 60),
        }
        victim.join(10.0)
        found["killed"] = {"exit": victim.exitcode, "worlds left": worlds_left(url)}
        if victim.exitcode != -signal.SIGKILL:
            raise RuntimeError("the victim died of something else")
    for name in ("steady", "thinks 2 s", "resets in 5 s"):
        found[name]["off the clock, %"] = round(abs(found[name]["rate"] / fps - 1) * 100, 3)
    return found


def worlds_left(url: str) -> int:
    """Worlds on the server, once those of clients that are gone were closed."""
    deadline = time.monotonic() + 10.0
    while True:
        with Inspector(url, 10.0) as inspector:
            count = int(unpack_tensor(inspector.read_property("server.worlds"))[()])
        if count == 0 or time.monotonic() > deadline:
            return count
        time.sleep(0.1)


def price_of_diagnostics(rounds: int, seconds: float) -> dict[str, Any]:
    """Steps a second with and without, in turns in one run."""
    with server_process(10.0, False) as url:
        rates: dict[bool, list[float]] = {True: [], False: []}
        busy: dict[bool, list[float]] = {True: [], False: []}
        envs = {on: make_vec_remote(url, num_envs=4, diagnostics=on) for on in rates}
        for item in envs.values():
            item.reset(seed=0)
            while any(row is None for row in item.step(np.zeros(4, np.int64))[0]):
                pass
        for _ in range(rounds):
            for on, item in envs.items():
                count, start, cpu = 0, time.monotonic(), time.thread_time()
                while time.monotonic() < start + seconds:
                    item.step(np.zeros(4, np.int64))
                    count += 1
                rates[on].append(count * 4 / (time.monotonic() - start))
                busy[on].append((time.thread_time() - cpu) / (count * 4) * 1e6)
        for item in envs.values():
            item.close()
    with_, without = statistics.median(rates[True]), statistics.median(rates[False])
    return {
        "slot steps/s with": round(with_),
        "slot steps/s without": round(without),
        "ratio": round(statistics.median(a / b for a, b in zip(rates[True], rates[False], strict=True)), 3),
        "client's microseconds a slot step with": round(statistics.median(busy[True]), 1),
        "client's microseconds a slot step without": round(statistics.median(busy[False]), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.realtime", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long (default: 60)")
    parser.add_argument("--fps", type=float, default=60.0, metavar="X", help="frame rate (default: 60)")
    parser.add_argument("--shared-lock", action="store_true", help="all environments under one lock, as by default")
    parser.add_argument("--serve", type=float, metavar="FPS", help=argparse.SUPPRESS)
    add_busy(parser)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.shared_lock)
        return 0
    print(f"Python {platform.python_version()}, {platform.machine()}, {multiprocessing.cpu_count()} cores")
    with measuring(parser, arguments.busy):
        found = four_agents(arguments.seconds, arguments.fps, arguments.shared_lock)
        found["diagnostics"] = price_of_diagnostics(5, 1.0)
    print(json.dumps(found, indent=2))
    kept = all(found[name]["off the clock, %"] <= 1.0 for name in ("steady", "thinks 2 s", "resets in 5 s"))
    intact = all(found[name]["episodes intact"] for name in ("steady", "thinks 2 s", "resets in 5 s"))
    print(f"rate kept within 1 %: {kept}; episodes intact: {intact}")
    return 0 if kept and intact else 1


if __name__ == "__main__":
    sys.exit(main())
