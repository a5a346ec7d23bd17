"""`python -m benchmarks.web`: what the page costs, and how long a key takes to its picture.

A server in a process of its own publishes CartPole (600×400 pixels) at 60 frames a second. Chromium presses keys, and
the page tells the time from each to the picture that shows its effect. Then viewers without a browser watch, in a
process of their own: pictures and data of each, and the frames that the world dropped. Last, a trainer steps a
lock-step world as fast as it can, in turns without and with viewers: its steps, and the server's processor time for
each of them, which other programs of the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
from websockets.asyncio.client import connect

from benchmarks.alone import add_busy, measuring
from bridge import make_remote
from bridge.encoding.tensors import pack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import ServerProcess
from bridge.transport.address import parse_address
from bridge.transport.websocket import PATH, SUBPROTOCOL

WARM_UP = 1.0
# Seconds after which viewers that were held look again, and those that are held do no more.
SETTLE = 0.4


@contextmanager
def server(*options: str) -> Iterator[tuple[str, int, psutil.Process]]:
    """Run `bridge serve CartPole-v1 --web`; give the URL of the page, the port and the process."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    with ServerProcess("CartPole-v1", "--web", *options) as process:
        port = parse_address(process.url).port
        yield f"http://127.0.0.1:{port}/", port, psutil.Process(process.pid)


def keys(url: str, presses: int) -> list[float]:
    """Press keys in Chromium; return the milliseconds from each to the picture of its effect."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("chromium is not installed: apt-get install --no-install-recommends chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.click("#begin")
        page.wait_for_selector("#legend kbd")
        page.wait_for_timeout(2000)
        for press in range(presses):
            key = ("ArrowLeft", "ArrowRight")[press % 2]
            page.keyboard.down(key)
            page.wait_for_timeout(137)
            page.keyboard.up(key)
            page.wait_for_timeout(113)
        page.wait_for_timeout(1500)
        found = page.get_attribute("#latency", "data-all") or ""
        browser.close()
    return [float(value) for value in found.split()]


async def _look(port: int, seconds: float, started: asyncio.Event) -> tuple[int, int]:
    """Watch; return how many pictures came, and their bytes."""
    names = [SUBPROTOCOL]  # type: ignore[list-item]
    async with connect(f"ws://127.0.0.1:{port}{PATH}", subprotocols=names, max_size=None) as socket:  # type: ignore[arg-type]
        settings = {"frame": pack_tensor("jpeg"), "role": pack_tensor("spectator")}
        await socket.send(pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(settings=settings)).SerializeToString())
        answer = pb.EnvironmentResponse.FromString(bytes(await socket.recv()))  # type: ignore[arg-type]
        uids = {spec.name: uid for uid, spec in answer.join_world.specs.observations.items()}
        step = pb.EnvironmentRequest(step=pb.StepRequest(requested_observations=[uids["frame"]])).SerializeToString()
        await socket.send(step)
        await socket.recv()
        await started.wait()
        count = size = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await socket.send(step)
            data = await socket.recv()
            count += len(data) > 1000
            size += len(data)
        return count, size


async def _look_all(port: int, viewers: int, seconds: float) -> list[tuple[int, int]]:
    started = asyncio.Event()
    tasks = [asyncio.create_task(_look(port, seconds, started)) for _ in range(viewers)]
    await asyncio.sleep(WARM_UP)
    started.set()
    return await asyncio.gather(*tasks)


@contextmanager
def looking(port: int, viewers: int, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Watch in a process of its own, which prints what each viewer had."""
    command = [sys.executable, "-m", "benchmarks.web", "--look", str(port), str(viewers), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.wait()


def watched(port: int, viewers: int, seconds: float) -> dict[str, Any]:
    """Have viewers watch a real-time world; return what they had, and what the world dropped."""
    env = make_remote(f"grpc://127.0.0.1:{port}?world=", wait="next_frame")
    env.reset()

    def counts() -> tuple[int, int]:
        info = env.step(0)[-1]
        if env.step(0)[2]:
            env.reset()
        latency = info["latency"]
        return int(latency["frames_dropped"]), int(latency["overruns"])

    before = counts()
    with looking(port, viewers, seconds) as process:
        end = time.monotonic() + seconds + 2 * WARM_UP
        while process.poll() is None and time.monotonic() < end + 30:
            if any(env.step(0)[2:4]):
                env.reset()
        found = json.loads(process.stdout.read() if process.stdout else "[]")
    env.reset()
    after = counts()
    env.close()
    return {
        "pictures_per_second": statistics.mean(count for count, _ in found) / seconds,
        "mbit_per_second": max(size for _, size in found) * 8 / seconds / 1e6,
        "dropped": after[0] - before[0],
        "overruns": after[1] - before[1],
    }


def trained(
    port: int, process: psutil.Process, viewers: int, seconds: float, rounds: int
) -> tuple[list[float], list[float]]:
    """Step a lock-step world as fast as can be, in turns with viewers and with viewers that are held.

    Turns are short, and each is compared with those around it, so that what else the machine does weighs on both alike.

    Returns:
        Of each turn with viewers the share of its steps that a trainer keeps, and how many times the server's processor
        time each of them takes.
    """
    env = make_remote(f"grpc://127.0.0.1:{port}?world=")
    env.reset(seed=0)

    def used() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    def steps(wanted: float) -> tuple[float, float]:
        count, began, before = 0, time.perf_counter(), used()
        while time.perf_counter() - began < wanted:
            _, _, terminated, truncated, _ = env.step(count & 1)
            count += 1
            if terminated or truncated:
                env.reset()
        return count / (time.perf_counter() - began), (used() - before) / count

    shares, costs = [], []
    with looking(port, viewers, (2 * rounds + 4) * (seconds + SETTLE) + WARM_UP) as look:
        steps(3 * WARM_UP)  # until they look
        people = psutil.Process(look.pid)

        def alone() -> tuple[float, float]:
            people.suspend()
            steps(SETTLE)
            return steps(seconds)

        before = alone()
        for _ in range(rounds):
            people.resume()
            steps(SETTLE)
            kept, cost = steps(seconds)
            after = alone()
            shares.append(2 * kept / (before[0] + after[0]))
            costs.append(2 * cost / (before[1] + after[1]))
            before = after
        people.resume()
        people.terminate()
    env.close()
    return shares, costs


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median, by drawing the values again and again."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def measure_keys(presses: int) -> None:
    """Print the time from a key to its picture."""
    with server("--fps", "60") as (url, _, _):
        times = sorted(keys(url, presses))
        print(
            f"key to painted picture, {len(times)} keys: median {statistics.median(times):.0f} ms, "
            f"95 % {times[int(0.95 * len(times))]:.0f} ms, longest {times[-1]:.0f} ms"
        )


def measure_viewers(viewers: int, seconds: float) -> None:
    """Print what viewers of a real-time world get, and what they cost it."""
    with server("--fps", "60") as (_, port, _):
        found = watched(port, viewers, seconds)
        print(
            f"{viewers} viewers at 60 fps: {found['pictures_per_second']:.1f} pictures/s and at most "
            f"{found['mbit_per_second']:.2f} Mbit/s each; the world dropped {found['dropped']} frames, "
            f"{found['overruns']} overruns"
        )


def measure_trainer(viewers: int, turn: float, rounds: int) -> None:
    """Print what viewers cost a trainer."""
    with server() as (_, port, process):
        shares, costs = trained(port, process, viewers, turn, rounds)
        low, high = interval(shares)
        least, most = interval(costs)
        print(
            f"trainer with {viewers} viewers: {statistics.median(shares):.1%} of its steps (median of {len(shares)} "
            f"turns, 95 % interval {low:.1%} to {high:.1%}), and {statistics.median(costs):.2f} times the server's "
            f"processor time a step ({least:.2f} to {most:.2f})"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.web", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--presses", type=int, default=100)
    parser.add_argument("--viewers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=30, help="turns of the trainer with viewers")
    parser.add_argument("--turn", type=float, default=1.5, help="seconds of each")
    parser.add_argument("--only", choices=("keys", "viewers", "trainer"), help="measure that alone")
    parser.add_argument("--look", nargs=3, metavar=("PORT", "VIEWERS", "SECONDS"), help=argparse.SUPPRESS)
    add_busy(parser)
    arguments = parser.parse_args(argv)
    if arguments.look is not None:
        port, viewers, seconds = arguments.look
        print(json.dumps(asyncio.run(_look_all(int(port), int(viewers), float(seconds)))))
        return 0
    warnings.simplefilter("ignore")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with measuring(parser, arguments.busy):
        if arguments.only in (None, "keys"):
            measure_keys(arguments.presses)
        if arguments.only in (None, "viewers"):
            measure_viewers(arguments.viewers, arguments.seconds)
        if arguments.only in (None, "trainer"):
            measure_trainer(arguments.viewers, arguments.turn, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
