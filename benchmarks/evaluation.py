"""`python -m benchmarks.evaluation`: how much of its slower half an evaluation reaches, 64 slots and 5 ms a batch.

Environments, policy and evaluation are processes of their own. Three rates, in turns: what the environments allow (an
evaluation with a policy in the loop that takes no time), what the policy allows (the same batches, without any
environment), and what the evaluation of both reaches. The policy sleeps, as one on a GPU leaves the processor free.
MountainCar's episodes have 200 steps each where nothing is done, so that no slot is idle before the others.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.alone import add_busy, measuring
from bridge.policies import RemotePolicy, evaluate

ENVIRONMENTS = """
import sys
from bridge import serve_gym
with serve_gym("MountainCar-v0", num_envs=int(sys.argv[1])) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""
POLICY = """
import sys, time
import numpy as np
from bridge.policies import serve_policy

def act(observations):
    time.sleep(float(sys.argv[1]))
    return np.ones(len(observations), np.int64)

with serve_policy(act) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def running(program: str, argument: str) -> Iterator[str]:
    """Run a program that prints a URL, until the block ends."""
    command = [sys.executable, "-c", program, argument]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("")


def still(observations: np.ndarray) -> np.ndarray:
    """Push nowhere."""
    return np.ones(len(observations), np.int64)


def policy_rate(policy: RemotePolicy, rows: int, requests: int) -> float:
    """Return how many actions a second a policy gives, in batches of half of the slots."""
    batch = np.zeros((rows, 2), np.float32)
    began = time.perf_counter()
    for _ in range(requests):
        policy(batch, slots=range(rows))
    return rows * requests / (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--lanes", type=int, default=1, help="lanes of each world (default: 1)")
    parser.add_argument("--batch-seconds", type=float, default=0.005)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    add_busy(parser)
    options = parser.parse_args()
    shares = []
    with (
        measuring(parser, options.busy),
        running(ENVIRONMENTS, str(options.lanes)) as url,
        running(POLICY, str(options.batch_seconds)) as policy_url,
        RemotePolicy(policy_url) as policy,
    ):
        given = {"num_envs": options.slots, "episodes": options.episodes, "timeout": 60.0}
        for _ in range(options.repeats):
            alone = evaluate(url, still, **given)
            environments = alone.steps / alone.seconds
            allowed = policy_rate(policy, options.slots // 2, 400)
            both = evaluate(url, policy, **given)
            reached = both.steps / both.seconds
            shares.append(reached / min(environments, allowed))
            print(
                f"environments {environments:7.0f}/s   policy {allowed:7.0f}/s   both {reached:7.0f}/s: "
                f"{shares[-1]:.2f} of the slower",
                flush=True,
            )
    print(f"median {statistics.median(shares):.2f} of the slower")


if __name__ == "__main__":
    main()
