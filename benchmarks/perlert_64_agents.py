"""64 PERLERT agents in one world at 30 frames a second on loopback, server and clients in a process each.

    python benchmarks/perlert_64_agents.py [--agents 64] [--fps 30] [--seconds 20] [--loss 0.1] [--key] [--threads]

Prints the rate that was held, steps lost, round trips and processor time of both ends. `--threads` plays with 64
`PerlertEnv` in a thread each instead of one loop over 64 sockets; `--key` enciphers everything; `--loss` drops so many
of the datagrams each way.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import random
import select
import threading
import time
from decimal import Decimal

import numpy as np
from gymnasium import spaces

from benchmarks.alone import add_busy, measuring
from bridge.perlert import PerlertEnv, serve_perlert
from bridge.perlert.address import parse_perlert_address
from bridge.perlert.client import PerlertClient
from bridge.perlert.player import PlayerState
from bridge.perlert.player_run import Stepped
from bridge.perlert.udp import ClientPort

KEY = "0123456789abcdef0123456789abcdef"


def reward(step: int, agent: int) -> float:
    """A reward with decimals that floats do not hold exactly."""
    return (step * 31 + agent * 7) % 1000 / 1000 - 0.5


class LossyPort:
    """A client's port that loses some of what goes through it, either way."""

    def __init__(self, port: ClientPort, loss: float, seed: int) -> None:
        self._port, self._loss, self._random = port, loss, random.Random(seed)

    def send(self, out: list) -> None:
        self._port.send([item for item in out if self._random.random() >= self._loss])

    def read(self) -> tuple | None:
        while (got := self._port.read()) is not None and self._random.random() < self._loss:
            pass
        return got

    def __getattr__(self, name: str) -> object:
        return getattr(self._port, name)


class Crowd:
    """A parallel environment: agents on a plane, each sees its place and the crowd's middle."""

    def __init__(self, agents: int, length: int) -> None:
        self.possible_agents = [f"walker_{number}" for number in range(agents)]
        self.agents: list[str] = []
        self.length = length

    def observation_space(self, agent: str) -> spaces.Box:
        return spaces.Box(-1000, 1000, (4,))

    def action_space(self, agent: str) -> spaces.Box:
        return spaces.Box(-1, 1, (2,))

    def _seen(self) -> dict[str, np.ndarray]:
        middle = self.places.mean(axis=0)
        return {
            agent: np.concatenate([place, middle])
            for agent, place in zip(self.possible_agents, self.places, strict=True)
        }

    def reset(self, seed: int | None = None, options: object = None) -> tuple[dict, dict]:
        self.agents = list(self.possible_agents)
        self.places = np.random.default_rng(seed).uniform(-10, 10, (len(self.agents), 2)).astype(np.float32)
        self.count = 0
        return self._seen(), {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        self.places = np.clip(self.places + np.stack([actions[agent] for agent in self.agents]), -1000, 1000)
        self.count += 1
        agents, over = self.agents, self.count >= self.length
        if over:
            self.agents = []
        rewards = {agent: reward(self.count, number) for number, agent in enumerate(agents)}
        return self._seen(), rewards, dict.fromkeys(agents, False), dict.fromkeys(agents, over), {}

    def close(self) -> None:
        pass


def serve(pipe: multiprocessing.connection.Connection, agents: int, fps: float, length: int, key: str | None) -> None:
    with serve_perlert(lambda: Crowd(agents, length), name="crowd", fps=fps, seed=1, key=key) as server:
        pipe.send(server.url)
        pipe.recv()
        used = time.process_time()
        pipe.recv()
        pipe.send((server.stats(), time.process_time() - used))
        pipe.recv()


def play_in_one_loop(url: str, agents: int, key: str | None, loss: float, seconds: float) -> tuple[float, list[dict]]:
    """Play with one loop over all sockets; return (seconds from the first to the last step, results)."""
    address = parse_perlert_address(url)
    clients = [
        PerlertClient(address, agent=f"walker_{number}", tag=f"t{number}", key=key, action="0,0")
        for number in range(agents)
    ]
    for number, client in enumerate(clients):
        if loss:
            client.port = LossyPort(client.port, loss, number)  # type: ignore[assignment]
    by_file = {client.port.fileno(): client for client in clients}
    results: list[dict] = [{"steps": 0, "rtt": []} for _ in clients]
    index = {client: number for number, client in enumerate(clients)}
    first, left = None, set(range(agents))
    generator = np.random.default_rng(0)
    deadline = time.monotonic() + seconds + 120
    for client in clients:
        client.pump()
    while left and time.monotonic() < deadline:
        wakes = {client: client.player.wake() for client in clients}
        wait = min(wakes.values()) - time.monotonic()
        ready, _, _ = select.select(list(by_file), [], [], max(0.0, min(wait, 1.0)))
        now = time.monotonic()
        for client in {client for client, wake in wakes.items() if wake <= now} | {by_file[file] for file in ready}:
            client.pump()
            result = results[index[client]]
            while client.player.events:
                event = client.player.events.popleft()
                if isinstance(event, Stepped):
                    first = first or time.monotonic()
                    result["steps"] += 1
                    if client.player.stats.rtt_last is not None:
                        result["rtt"].append(client.player.stats.rtt_last)
                    if event.done:
                        result |= {"return": event.ret, "lost": client.player.stats.lost}
                        left.discard(index[client])
                    else:
                        x, y = generator.uniform(-1, 1, 2).round(3)
                        client.port.send(client.player.act(f"{x},{y}", time.monotonic()))
    last = time.monotonic()
    assert all(client.player.state is PlayerState.OVER for client in clients), "a client did not see the end"
    for client in clients:
        client.close()
    return last - (first or last), results


def play_in_threads(url: str, agents: int, key: str | None, loss: float, seconds: float) -> tuple[float, list[dict]]:
    results: list[dict] = [{} for _ in range(agents)]
    envs = [PerlertEnv(url, agent=f"walker_{number}", key=key) for number in range(agents)]
    spans = []

    def play(number: int, env: PerlertEnv) -> None:
        env.reset()
        begun = time.monotonic()
        steps, rtt, done = 0, [], False
        while not done:
            _, _, terminated, truncated, info = env.step(env.action_space.sample())
            steps, done = steps + 1, terminated or truncated
            if info["perlert"]["rtt_last"] is not None:
                rtt.append(info["perlert"]["rtt_last"])
        results[number] = {
            "steps": steps,
            "rtt": rtt,
            "return": Decimal(str(round(info["return"], 6))),
            "lost": info["perlert"]["lost"],
        }
        spans.append((begun, time.monotonic()))

    threads = [threading.Thread(target=play, args=item) for item in enumerate(envs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 120)
    for env in envs:
        env.close()
    return max(end for _, end in spans) - min(begin for begin, _ in spans), results


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.perlert_64_agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--fps", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--key", action="store_true")
    parser.add_argument("--threads", action="store_true")
    add_busy(parser)
    args = parser.parse_args()
    with measuring(parser, args.busy):
        length = round(args.fps * args.seconds)
        key = KEY if args.key else None
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, args.agents, args.fps, length, key))
        process.start()
        url = ours.recv()
        ours.send("go")
        used = time.process_time()
        span, results = (play_in_threads if args.threads else play_in_one_loop)(
            url, args.agents, key, args.loss, args.seconds
        )
        client_cpu = time.process_time() - used
        ours.send("stop")
        stats, server_cpu = ours.recv()
        ours.send("bye")
        process.join(20)
        rtt = np.concatenate([result["rtt"] for result in results]) * 1000
        print(f"{args.agents} agents, {length} frames asked for at {args.fps:g} fps")
        late = stats["crowd:0"]["late_frames"]
        exact = [sum(Decimal(repr(reward(step, i))) for step in range(1, length + 1)) for i in range(args.agents)]
        same = all(abs(result["return"] - ret) < Decimal("1e-6") for result, ret in zip(results, exact, strict=True))
        print(f"  rate held            {length / span:.2f} frames a second ({late} frames late, {late / length:.2%})")
        print(f"  load of the machine  {os.getloadavg()[0]:.1f} processes wait for {os.cpu_count()} cores")
        print(f"  steps per agent      {np.mean([result['steps'] for result in results]):.1f} of {length + 1}")
        print(f"  steps lost           {sum(result['lost'] or 0 for result in results)}")
        print(f"  returns exact        {same}")
        median, high = np.median(rtt), np.percentile(rtt, 99)
        print(f"  action to step (ms)  median {median:.1f}, 99 % {high:.1f}; a frame is {1000 / args.fps:.1f}")
        print(f"  processor            server {server_cpu / span:.0%}, clients {client_cpu / span:.0%} of a core")


if __name__ == "__main__":
    main()
