"""RLlib's PPO on environments of a Ray fleet, whose servers are separate from the env runners.

    python examples/rllib_ppo.py --servers 2 --iterations 5

Env runners then need neither the simulator nor its dependencies. If a server is lost, the env runners that used it make
their environments again on other servers. RLlib 2.60 pins Gymnasium 1.2.2, which this package supports:

    pip install 'ray[rllib]' torch -e '.[ray]'    # in a clone of the repository
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.registry import register_env

from bridge import make_remote
from bridge.fleet.ray import attach, launch

NAME = "rllib-cartpole"


def remote_env(config: Any) -> gymnasium.Env[Any, Any]:
    """Connect an environment of an env runner, whose number selects the server."""
    endpoints = [endpoint for endpoint in attach(NAME).endpoints() if not endpoint.draining]
    number = config.worker_index + (config.vector_index or 0)
    return make_remote(endpoints[number % len(endpoints)].url)


def main() -> None:
    """Train, and print the progress."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--cpus-per-server", type=float, default=0.5)
    arguments = parser.parse_args()

    register_env("remote-cartpole", remote_env)
    with launch(
        "CartPole-v1",
        servers=arguments.servers,
        slots_per_server=64,
        name=NAME,
        cpus_per_server=arguments.cpus_per_server,
    ) as fleet:
        config = (
            PPOConfig()
            .environment("remote-cartpole")
            .env_runners(num_env_runners=arguments.runners, num_envs_per_env_runner=4, num_cpus_per_env_runner=0.5)
            .fault_tolerance(restart_failed_env_runners=True, restart_failed_sub_environments=True)
            .training(train_batch_size_per_learner=arguments.batch, num_epochs=4, minibatch_size=128)
        )
        algorithm = config.build_algo()
        try:
            for iteration in range(arguments.iterations):
                result = algorithm.train()
                print(
                    f"iteration {iteration}: mean return {result['env_runners']['episode_return_mean']:.1f}", flush=True
                )
            print(fleet.status())
        finally:
            algorithm.stop()


if __name__ == "__main__":
    main()
