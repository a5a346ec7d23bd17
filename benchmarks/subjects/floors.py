"""Floors: the same environments and as many bytes over a bare Unix socket, with one thread at each end.

What two processes cannot do without: somebody steps the environments, one message goes there and one comes back.
Nothing is encoded, checked or reset by itself.
"""

from __future__ import annotations

import selectors
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.registry import Measure, goal, subject
from benchmarks.serving import Script
from benchmarks.subjects.cartpole import LANES
from benchmarks.subjects.lanes import MANY
from benchmarks.subjects.pictures import FLOATS, FRAMES

ECHO = """
import socket, sys
import gymnasium
import benchmarks.envs
path, env_id, mode, count, request, answer = *sys.argv[1:4], *map(int, sys.argv[4:])
if count == 1:
    env = gymnasium.make(env_id)
    actions = [0, 1]
else:
    env = gymnasium.make_vec(env_id, num_envs=count, vectorization_mode=mode)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
print("ready", flush=True)
connection = listener.accept()[0]
env.reset(seed=0)
steps, held, taken = 0, bytes(answer), bytearray(request)
while connection.recv_into(taken, request, socket.MSG_WAITALL):
    _, _, terminated, truncated, _ = env.step(actions[steps % len(actions)])
    if count == 1 and (terminated or truncated):
        env.reset()
    connection.sendall(held)
    steps += 1
"""


def floor(env_id: str, count: int, request: int, answer: int, mode: str = "sync") -> Iterator[Measure]:
    """Yield a measure of env steps per second.

    Args:
        env_id: The environment.
        count: How many of them.
        request: The bytes of the requests of a vector step.
        answer: The bytes of its answers.
        mode: How Gymnasium steps them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        with (
            Script(ECHO, path, env_id, mode, str(count), str(request), str(answer)),
            socket.socket(socket.AF_UNIX) as end,
        ):
            end.connect(path)
            asked, came = bytes(request), bytearray(answer)

            def measure(seconds: float) -> float:
                steps = 0
                start = time.perf_counter()
                until = start + seconds
                while (now := time.perf_counter()) < until:
                    end.sendall(asked)
                    end.recv_into(came, answer, socket.MSG_WAITALL)
                    steps += count
                return steps / (now - start)

            yield measure


@subject("floor-one", "floor: one CartPole and an echo over a Unix socket", group="one", kind="floor")
def floor_of_one() -> Iterator[Measure]:
    yield from floor("CartPole-v1", 1, 46, 130)


@subject("floor-64", f"floor: {LANES} CartPoles and an echo over a Unix socket", group="cartpole", kind="floor")
def floor_of_lanes() -> Iterator[Measure]:
    yield from floor("CartPole-v1", LANES, 120, 1_800)


@subject("floor-2-processes", f"floor: {LANES} CartPoles in two processes, and echoes", group="cartpole", kind="floor")
def floor_of_two_processes() -> Iterator[Measure]:
    lanes, request, answer = LANES // 2, 90, 920
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        selector = stack.enter_context(selectors.DefaultSelector())
        for path in (f"{folder}/0", f"{folder}/1"):
            stack.enter_context(Script(ECHO, path, "CartPole-v1", "sync", str(lanes), str(request), str(answer)))
            end = stack.enter_context(socket.socket(socket.AF_UNIX))
            end.connect(path)
            end.sendall(bytes(request))
            selector.register(end, selectors.EVENT_READ, end)
        came = bytearray(answer)

        def measure(seconds: float) -> float:
            steps = 0
            start = time.perf_counter()
            until = start + seconds
            while (now := time.perf_counter()) < until:
                for key, _ in selector.select():
                    key.data.recv_into(came, answer, socket.MSG_WAITALL)
                    key.data.sendall(bytes(request))
                    steps += lanes
            return steps / (now - start)

        yield measure


@subject("floor-worlds", f"floor: {LANES} CartPoles and an echo of {LANES} messages", group="worlds", kind="floor")
def floor_of_worlds() -> Iterator[Measure]:
    yield from floor("CartPole-v1", LANES, LANES * 46, LANES * 130)


@subject("floor-frames", f"floor: {FRAMES} × 210×160×3 and an echo", group="frames", kind="floor")
def floor_of_frames() -> Iterator[Measure]:
    yield from floor("Frames-v0", FRAMES, 120, FRAMES * 210 * 160 * 3)


@subject("floor-floats", f"floor: {FLOATS} × 84×84×4 float32 and an echo", group="floats", kind="floor")
def floor_of_floats() -> Iterator[Measure]:
    yield from floor("Floats-v0", FLOATS, 60, FLOATS * 84 * 84 * 4 * 4)


@subject("floor-vector-64", "floor: CartPole's own vector env, 64, and an echo", group="vectorized-64", kind="floor")
def floor_of_vector() -> Iterator[Measure]:
    yield from floor("CartPole-v1", 64, 120, 1_800, "vector_entry_point")


@subject(
    "floor-vector-4096", f"floor: CartPole's own vector env, {MANY}, and an echo", group="vectorized-4096", kind="floor"
)
def floor_of_large_vector() -> Iterator[Measure]:
    yield from floor("CartPole-v1", MANY, 8_200, 107_000, "vector_entry_point")


goal("B-5", "one-unix", against="floor-one", at_least=1 / 3)
