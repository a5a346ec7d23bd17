"""Serve a policy of three lines, which balances poles that another server simulates.

    python examples/policy_numpy.py
    python examples/policy_numpy.py --num-envs 64

Prints the total reward of the environments, and how often the policy was called: once per step, for all of them. Needs
the extra `policy`.
"""

from __future__ import annotations

import argparse

import numpy as np

from bridge import make_vec_remote, serve_gym
from bridge.policies import RemotePolicy, serve_policy


def act(observations: np.ndarray) -> np.ndarray:
    """Push the cart in the direction in which the pole falls."""
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


def main() -> None:
    """Serve the policy and the environments, and run the loop between them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=8, help="environments side by side (default: 8)")
    parser.add_argument("--steps", type=int, default=200, help="steps of each (default: 200)")
    arguments = parser.parse_args()
    with serve_gym("CartPole-v1") as server, serve_policy(act) as policies, RemotePolicy(policies.url) as policy:
        envs = make_vec_remote(server.url, num_envs=arguments.num_envs, blocking=True)
        observations, _ = envs.reset(seed=0)
        total = 0.0
        for _ in range(arguments.steps):
            observations, rewards, *_ = envs.step(policy(observations, slots=range(arguments.num_envs)))
            total += float(rewards.sum())
        envs.close()
        print(f"{arguments.steps} steps of {arguments.num_envs} environments, reward {total:g}: {policies.calls} calls")


if __name__ == "__main__":
    main()
