"""`gymnasium-bridge bench`: measure how fast a server steps, from this client."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from bridge.cli.program import OK, add_wait_option, positive, seed_number
from bridge.core.transport.credentials import add_credential_options, credential_keywords
from bridge.errors import shown_url
from bridge.facade.make import make_vec_remote

if TYPE_CHECKING:
    from bridge.wrappers import BlockingReset

__all__ = ["register"]

_EPILOG = """examples:
  gymnasium-bridge bench grpc://localhost:50051
  gymnasium-bridge bench localhost:50051 --num-envs 64             as make_vec_remote(url, num_envs=64, blocking=True)
  gymnasium-bridge bench localhost:50051/CartPole-v1?num_envs=64   a world of 64 lanes
  gymnasium-bridge bench host-a:50051 host-b:50051 --seconds 20

A step is one call of step() on the vector environment, with random actions. The latency is the time that a training
loop waits for it.
"""
# Actions sampled ahead, because sampling must not be measured.
_ACTIONS = 64


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "bench",
        description="Step environments with random actions; print steps per second and percentiles of the latency.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "urls",
        metavar="URL",
        nargs="+",
        help="grpc://HOST:PORT; several URLs are stepped as one vector environment; or one directory, such as "
        "file:///PATH, or listen://HOST:PORT for servers that dial",
    )
    parser.add_argument(
        "--num-envs",
        type=int,
        metavar="N",
        help="total number of environments (default: one for each URL, or its lanes)",
    )
    parser.add_argument("--seconds", type=positive, default=5.0, metavar="S", help="how long to step (default: 5)")
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="N", help="seed of environments and actions (default: 0)"
    )
    parser.add_argument(
        "--timeout", type=positive, default=10.0, metavar="S", help="seconds to wait for each answer (default: 10)"
    )
    add_wait_option(parser)
    add_credential_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    held = credential_keywords(arguments)
    held.update(num_envs=arguments.num_envs, timeout=arguments.timeout, wait_for_server=arguments.wait_for_server)
    urls = arguments.urls[0] if len(arguments.urls) == 1 else arguments.urls  # a directory is one URL
    envs = make_vec_remote(urls, blocking=True, **held)
    try:
        worlds = [len(remote.slots) for remote in cast("BlockingReset", envs).remotes() if remote.slots]
        latencies, steps, episodes = _measure(envs, arguments.seconds, arguments.seed)
    finally:
        envs.close()
    total = latencies.sum()
    print(f"{' '.join(map(shown_url, arguments.urls))}: {_form(worlds)}")
    print(f"  env steps/s  {steps / total:,.0f}  (without the {len(latencies) * envs.num_envs - steps:,} resets)")
    print(f"  steps/s      {len(latencies) / total:,.0f}  ({len(latencies):,} in {total:.2f} s)")
    shares = (50, 90, 99, 100)
    points = np.percentile(latencies, shares) * 1000
    names = ("median", "90 %", "99 %", "most")
    print(f"  latency/ms   {', '.join(f'{name} {point:.3g}' for name, point in zip(names, points, strict=True))}")
    print(f"  episodes     {episodes:,} ended")
    return OK


def _form(worlds: Sequence[int]) -> str:
    """Describe the number of environments and their worlds; `worlds` has the number of slots of each world."""
    count = sum(worlds)
    if count == 1:
        return "1 environment"
    if len(worlds) == 1:
        return f"{count} environments, lanes of one world"
    lanes = "" if count == len(worlds) else f" of {', '.join(map(str, sorted(set(worlds))))} lanes"
    return f"{count} environments, {len(worlds)} worlds{lanes}"


def _measure(envs: VectorEnv[Any, Any, Any], seconds: float, seed: int) -> tuple[np.ndarray[Any, Any], int, int]:
    """Return the seconds of each step, the number of environment steps, and the number of ended episodes."""
    envs.reset(seed=seed)
    envs.action_space.seed(seed)
    actions = [envs.action_space.sample() for _ in range(_ACTIONS)]
    for action in actions[:3]:  # warm up, because the first steps are slow
        _, _, terminations, truncations, _ = envs.step(action)
    # In NEXT_STEP mode, the step after the end of an episode only resets.
    resets_next = envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    latencies: list[float] = []
    steps = episodes = 0
    now = shown = time.perf_counter()
    end = now + seconds
    while now < end:
        before = now
        steps += envs.num_envs - (int((terminations | truncations).sum()) if resets_next else 0)
        _, _, terminations, truncations, _ = envs.step(actions[len(latencies) % _ACTIONS])
        now = time.perf_counter()
        latencies.append(now - before)
        episodes += int((terminations | truncations).sum())
        if sys.stderr.isatty() and now - shown > 0.5:
            shown = now
            print(f"\r\x1b[K{end - now:.0f} s to go, {len(latencies):,} steps", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return np.array(latencies), steps, episodes
