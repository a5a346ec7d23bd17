"""`python -m benchmarks.web`: what the page costs, how long a key takes to its picture, and how even the pace is.

A server in a process of its own publishes CartPole (600×400 pixels) at 60 frames a second. Chromium presses keys, and
the page tells the time from each to the picture that shows its effect. Then a person in Chromium takes over from a
trainer in lock-step, and so paces it: by how much the intervals between its steps, and between the pictures that are
painted, differ from one frame. Then viewers without a browser, each in a process of its own, watch the world in real
time: pictures and data of each, and the frames that the world dropped. Last, a trainer steps a lock-step world as fast
as it can, in turns without and with viewers: its steps, and the server's processor time for each of them, which other
programs of the machine disturb less. Each figure is printed with its goal.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import psutil
from websockets.asyncio.client import connect

from benchmarks.alone import add_busy, measuring
from bridge import make_remote
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.transport.address import parse_address
from bridge.core.transport.websocket import PATH, SUBPROTOCOL
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import ServerProcess

WARM_UP = 1.0
PAINTED = """() => {
  window.painted = [];
  new MutationObserver(() => window.painted.push(performance.now()))
    .observe(document.getElementById("canvas"), {attributes: true, attributeFilter: ["data-pictures"]});
}"""
FPS = 60
FOREVER = 1e9
# Seconds after which viewers that were held look again, and those that are held do no more.
SETTLE = 0.4


@contextmanager
def server(*options: str, env: str = "CartPole-v1") -> Iterator[tuple[str, int, psutil.Process]]:
    """Run `gymnasium-bridge serve --web`; give the URL of the page, the port and the process."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    with ServerProcess(env, "--web", *options) as process:
        port = parse_address(process.url).port
        yield f"http://127.0.0.1:{port}/", port, psutil.Process(process.pid)


@contextmanager
def page_of(url: str) -> Iterator[Any]:
    """Open a page in Chromium, without a window."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-headless-shell"))), None)
    if chromium is None:
        raise SystemExit("chromium is not installed: apt-get install --no-install-recommends chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        yield page
        browser.close()


def press(page: Any, number: int) -> None:
    """Hold the left or the right arrow, in turns, for some frames."""
    key = ("ArrowLeft", "ArrowRight")[number % 2]
    page.keyboard.down(key)
    page.wait_for_timeout(137)
    page.keyboard.up(key)
    page.wait_for_timeout(113)


def keys(url: str, presses: int) -> list[float]:
    """Press keys in Chromium; return the milliseconds from each to the picture of its effect."""
    with page_of(url) as page:
        page.click("#begin")
        page.wait_for_selector("#legend kbd")
        page.wait_for_timeout(2000)
        for number in range(presses):
            press(page, number)
        page.wait_for_timeout(1500)
        found = page.get_attribute("#latency", "data-all") or ""
    return [float(value) for value in found.split()]


def _train(port: int, pipe: Connection) -> None:
    """Step the lock-step world until told to stop; send the times, in ms, of the steps that a person paced."""
    env = make_remote(f"grpc://127.0.0.1:{port}?world=")
    env.reset(seed=0)
    pipe.send(None)
    times = []
    while not pipe.poll():
        info = env.step(1)[4]
        if "takeover_fps" in info:
            times.append(1000 * time.perf_counter())
    env.close()
    pipe.send(times)


def paced(url: str, port: int, seconds: float) -> tuple[list[float], list[float]]:
    """Take over from a trainer at the page; return the times, in ms, of the steps and of the pictures painted."""
    with process_of(_train, port) as (_, pipe), page_of(url) as page:
        pipe.recv()
        page.wait_for_function("() => document.getElementById('play').textContent.startsWith('Take over')")
        page.click("#play")
        page.wait_for_function("() => document.getElementById('badge').textContent.includes('hold a key')")
        page.evaluate(PAINTED)
        end = time.monotonic() + seconds + WARM_UP
        for number in itertools.count():
            if time.monotonic() > end:
                break
            press(page, number)
        pictures = page.evaluate("() => window.painted")
        pipe.send(None)
        steps = pipe.recv()
    return steps, pictures


def jitter(times: Sequence[float]) -> list[float]:
    """Return by how many frames each interval differs from one frame, sorted; leaves out the first second."""
    kept = [at for at in times if at > times[0] + 1000 * WARM_UP]
    return sorted(abs((later - at) * FPS / 1000 - 1) for at, later in itertools.pairwise(kept))


async def _look_through(port: int, seconds: float, pipe: Connection) -> tuple[int, int]:
    names = [SUBPROTOCOL]  # type: ignore[list-item]
    async with connect(f"ws://127.0.0.1:{port}{PATH}", subprotocols=names, max_size=None) as socket:  # type: ignore[arg-type]
        settings = {"frame": pack_tensor("jpeg"), "role": pack_tensor("spectator")}
        await socket.send(pb.EnvironmentRequest(join_world=pb.JoinWorldRequest(settings=settings)).SerializeToString())
        answer = pb.EnvironmentResponse.FromString(bytes(await socket.recv()))  # type: ignore[arg-type]
        uids = {spec.name: uid for uid, spec in answer.join_world.specs.observations.items()}
        step = pb.EnvironmentRequest(step=pb.StepRequest(requested_observations=[uids["frame"]])).SerializeToString()
        await socket.send(step)
        await socket.recv()
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)  # until all of them look
        count = size = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await socket.send(step)
            data = await socket.recv()
            count += len(data) > 1000
            size += len(data)
        return count, size


def _look(port: int, seconds: float, pipe: Connection) -> None:
    """Watch; say when the first picture came, and at the end how many came, and their bytes."""
    pipe.send(asyncio.run(_look_through(port, seconds, pipe)))


@contextmanager
def process_of(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[psutil.Process, Connection]]:
    """Call a function in a process of its own; give the process, and a pipe to the function's last argument."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=function, args=(*arguments, other), daemon=True)
    process.start()
    other.close()
    try:
        yield psutil.Process(process.pid), pipe
    finally:
        process.kill()
        process.join()
        pipe.close()


class Viewers:
    """Viewers of a world, each in a process of its own.

    Args:
        stack: Ends them.
        port: The server's.
        count: Of the viewers.
        seconds: For which they look.
        meanwhile: Called again and again until all of them look.
    """

    def __init__(
        self, stack: ExitStack, port: int, count: int, seconds: float, meanwhile: Callable[[], object]
    ) -> None:
        started = [stack.enter_context(process_of(_look, port, seconds)) for _ in range(count)]
        self._processes = [process for process, _ in started]
        self._pipes = [pipe for _, pipe in started]
        self.said(meanwhile)
        for pipe in self._pipes:
            pipe.send(None)

    def said(self, meanwhile: Callable[[], object]) -> list[Any]:
        """Return the next that each of them says; calls `meanwhile` until then. Raises EOFError where one has ended."""
        while len(multiprocessing.connection.wait(self._pipes, 0)) < len(self._pipes):
            meanwhile()
        return [pipe.recv() for pipe in self._pipes]

    def hold(self) -> None:
        """Suspend them."""
        for process in self._processes:
            process.suspend()

    def resume(self) -> None:
        """Have them go on."""
        for process in self._processes:
            process.resume()


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

    def play() -> None:
        if any(env.step(0)[2:4]):
            env.reset()

    with ExitStack() as stack:
        people = Viewers(stack, port, viewers, seconds, play)
        env.reset()
        before = counts()
        found = people.said(play)
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
    with ExitStack() as stack:
        people = Viewers(stack, port, viewers, FOREVER, lambda: steps(0.1))

        def alone() -> tuple[float, float]:
            people.hold()
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
    env.close()
    return shares, costs


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median, by drawing the values again and again."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[-51]


def measure_keys(presses: int) -> None:
    """Print the time from a key to its picture."""
    with server("--fps", str(FPS)) as (url, _, _):
        times = sorted(keys(url, presses))
        print(
            f"key to painted picture, {len(times)} keys: median {statistics.median(times):.0f} ms (goal: at most 40), "
            f"95 % {times[int(0.95 * len(times))]:.0f} ms, longest {times[-1]:.0f} ms",
            flush=True,
        )


def measure_pace(seconds: float) -> None:
    """Print how even the pace is that a person gives a trainer."""
    # It does not end: a reset is a pause of another kind.
    options = ("--play-fps", str(FPS), "--env-kwargs", "max_episode_steps=1000000")
    with server(*options, env="MountainCar-v0") as (url, port, _):
        for name, times in zip(("steps", "painted pictures"), paced(url, port, seconds), strict=True):
            found = jitter(times)
            print(
                f"paced by a person at {FPS} fps, {len(found)} intervals between {name}: they differ from a frame by "
                f"{statistics.median(found):.2f} frames (median), 95 % by at most {found[int(0.95 * len(found))]:.2f} "
                "(goal: at most 1)",
                flush=True,
            )


def measure_viewers(viewers: int, seconds: float) -> None:
    """Print what viewers of a real-time world get, and what they cost it."""
    with server("--fps", str(FPS)) as (_, port, _):
        found = watched(port, viewers, seconds)
        print(
            f"{viewers} viewers, each in a process of its own, at {FPS} fps: {found['pictures_per_second']:.1f} "
            f"pictures/s and at most {found['mbit_per_second']:.2f} Mbit/s each; the world dropped {found['dropped']} "
            f"frames (goal: 0), {found['overruns']} overruns",
            flush=True,
        )


def measure_trainer(viewers: int, turn: float, rounds: int) -> None:
    """Print what viewers cost a trainer."""
    with server() as (_, port, process):
        shares, costs = trained(port, process, viewers, turn, rounds)
        low, high = interval(shares)
        least, most = interval(costs)
        print(
            f"trainer with {viewers} viewers, each in a process of its own: {statistics.median(shares):.1%} of its "
            f"steps (goal: at least 90 %; median of {len(shares)} turns, 95 % interval {low:.1%} to {high:.1%}), and "
            f"{statistics.median(costs):.2f} times the server's processor time a step ({least:.2f} to {most:.2f})",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.web", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--presses", type=int, default=100)
    parser.add_argument("--viewers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0, help="of pacing, and of the viewers")
    parser.add_argument("--rounds", type=int, default=30, help="turns of the trainer with viewers")
    parser.add_argument("--turn", type=float, default=1.5, help="seconds of each")
    parser.add_argument("--only", choices=("keys", "pace", "viewers", "trainer"), help="measure that alone")
    add_busy(parser)
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with measuring(parser, arguments.busy):
        if arguments.only in (None, "keys"):
            measure_keys(arguments.presses)
        if arguments.only in (None, "pace"):
            measure_pace(arguments.seconds)
        if arguments.only in (None, "viewers"):
            measure_viewers(arguments.viewers, arguments.seconds)
        if arguments.only in (None, "trainer"):
            measure_trainer(arguments.viewers, arguments.turn, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
