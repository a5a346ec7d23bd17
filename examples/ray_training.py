"""A training loop on a Ray fleet: the cross-entropy method on CartPole, with a different policy in each slot.

    python examples/ray_training.py --servers 4 --slots 64

Servers may be killed, machines lost, and the fleet scaled during training: slots move, and the loop continues. Needs
`pip install -e '.[ray]'`; connects to the cluster of this machine, or starts Ray on it.
"""

from __future__ import annotations

import argparse

import numpy as np

from bridge import make_vec_remote
from bridge.fleet.ray import launch
from bridge.wrappers import BlockingReset


def evaluate(envs: BlockingReset, policies: np.ndarray, seed: int) -> np.ndarray:
    """Play one episode with each slot's policy; return the returns, `(num_envs,)`."""
    observations, _ = envs.reset(seed=seed)
    returns = np.zeros(envs.num_envs)
    playing = np.ones(envs.num_envs, bool)
    while playing.any():
        features = np.concatenate([observations, np.ones((envs.num_envs, 1))], axis=1)
        actions = (np.einsum("ij,ij->i", features, policies) > 0).astype(np.int64)
        observations, rewards, terminations, truncations, _ = envs.step(actions)
        returns += rewards * playing
        playing &= ~(terminations | truncations)
    return returns


def main() -> None:
    """Train, and print the progress."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=32, help="policies that are tried in a generation")
    parser.add_argument("--generations", type=int, default=10)
    parser.add_argument("--cpus-per-server", type=float, default=1.0)
    parser.add_argument("--name", default="cartpole")
    arguments = parser.parse_args()

    per_server = -(-arguments.slots // arguments.servers)
    random = np.random.default_rng(0)
    mean, spread = np.zeros(5), np.full(5, 2.0)
    with launch(
        "CartPole-v1",
        servers=arguments.servers,
        slots_per_server=per_server,
        name=arguments.name,
        cpus_per_server=arguments.cpus_per_server,
    ) as fleet:
        envs = BlockingReset(make_vec_remote(fleet, num_envs=arguments.slots))
        for generation in range(arguments.generations):
            policies = mean + spread * random.standard_normal((arguments.slots, 5))
            returns = evaluate(envs, policies, seed=generation)
            elite = policies[np.argsort(returns)[-max(2, arguments.slots // 5) :]]
            mean, spread = elite.mean(axis=0), elite.std(axis=0) + 0.1
            print(f"generation {generation}: mean return {returns.mean():.1f}, best {returns.max():.0f}", flush=True)
        print(fleet.status())
        envs.close()


if __name__ == "__main__":
    main()
