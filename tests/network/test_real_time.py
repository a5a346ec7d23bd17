"""Worlds in real time 80 ms away, on a good line and on a bad one."""

from __future__ import annotations

import pytest

import bridge
from bridge.testing import Conditions, CountingEnv
from bridge.wrappers import BlockingReset, Throttle
from tests.network.programs import PORT, serve

LENGTH, FPS = 20, 25
RETURN = sum(range(LENGTH + 1))  # of an episode of CountingEnv, whose rewards are 1, 2, 3, …

LINES = {
    "steady": Conditions(delay=0.04),
    "jitter and loss": Conditions(delay=0.035, jitter=0.01, loss=0.02, in_order=True),
}


def counting():
    return CountingEnv(LENGTH)


def played(url, episodes, keywords):
    """Play some episodes; return the records of all, the return that the steps gave for each, and the latencies."""
    env = bridge.make_remote(url, **keywords)
    _, info = env.reset(seed=0)
    records, returns, latencies, total = [], [], [], 0.0
    while len(returns) < episodes:
        _, reward, terminated, truncated, info = env.step(0)
        total += reward
        latencies.append({name: float(value) for name, value in info["latency"].items()})
        records += info.get("episodes", ())
        if terminated or truncated:
            returns.append(total)
            total = 0.0
            _, info = env.reset()
            records += info.get("episodes", ())
    env.close()
    return [(record["episode"], record["return"], record["length"]) for record in records], returns, latencies


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("wait", [None, "now", "next_frame"], ids=["in flight", "now", "next frame"])
def test_every_return_arrives_exactly_80_ms_away(network, line, wait):
    game, trainer = network.machine("game-pc"), network.machine("trainer", LINES[line])
    game.start(serve, counting, {"fps": FPS}).next()
    keywords = {} if wait is None else {"wait": wait}
    records, returns, latencies = trainer.run(played, f"grpc://game-pc:{PORT}", 3, keywords)
    numbers = [number for number, _, _ in records]
    assert numbers == sorted(set(numbers)), "each end is told exactly once"
    assert {(total, length) for _, total, length in records} == {(RETURN, LENGTH)}
    assert set(returns) == {RETURN}, "the rewards of the steps add up to the return of their episode"
    seen = [latency for latency in latencies if latency["round_trip"] == latency["round_trip"]]
    assert min(latency["round_trip"] for latency in seen) >= 0.07, "the line takes 70 ms or more there and back"
    assert min(latency["observation_age"] for latency in seen) >= 0.035


def stepped(url, slots, steps):
    """Step slots at a frame's pace; return the observations' frames of each slot."""
    envs = BlockingReset(Throttle(bridge.make_vec_remote(url, num_envs=slots)))
    observations, _ = envs.reset(seed=0)
    seen = [observations.tolist()]
    for _ in range(steps):
        observations, *_ = envs.step(envs.action_space.sample())
        seen.append(observations.tolist())
    envs.close()
    return seen


def test_lanes_step_at_the_pace_of_frames_80_ms_away(network):
    game, trainer = network.machine("game-pc"), network.machine("trainer", LINES["steady"])
    game.start(serve, counting, {"fps": FPS, "num_envs": 4}).next()
    seen = trainer.run(stepped, f"grpc://game-pc:{PORT}", 4, 30)
    assert all(len(row) == 4 for row in seen)
    last = [row[0] for row in seen]
    assert last == sorted(last), "no lane goes back in time"
