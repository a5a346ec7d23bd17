"""Train RLlib's PPO on remote CartPoles, and print the mean return of each iteration.

python -m tests.pins.train_rllib URL RUNNERS
"""

from __future__ import annotations

import sys
from typing import Any

from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.registry import register_env

from bridge import RemoteEnv, make_remote


def main() -> None:
    """Train, in this process (RUNNERS is 0) or with actors of Ray."""
    url, runners = sys.argv[1], int(sys.argv[2])

    def remote(config: Any) -> RemoteEnv[Any, Any]:
        return make_remote(config["url"])

    register_env("remote", remote)
    config = (
        PPOConfig()
        .environment("remote", env_config={"url": url})
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=2, num_cpus_per_env_runner=0.5)
        .training(train_batch_size_per_learner=1000, num_epochs=6, minibatch_size=128, lr=1e-3)
        .debugging(seed=1)
    )
    algorithm = config.build_algo()
    try:
        for _ in range(5):
            print(f"mean return {algorithm.train()['env_runners']['episode_return_mean']:.1f}", flush=True)
    finally:
        algorithm.stop()


if __name__ == "__main__":
    main()
