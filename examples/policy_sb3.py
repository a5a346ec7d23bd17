"""Serve a Stable-Baselines3 model, and evaluate it on environments of another server.

    python examples/policy_sb3.py --model lander.zip --port 8000
    python examples/policy_sb3.py --steps 20000 --episodes 20

With `--model`, serves the model until Ctrl-C, for `gymnasium-bridge evaluate` or a robot. Without it, trains one on
CartPole first, and prints its mean return. Needs the extras `sb3` and `policy`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm

from bridge import serve_gym
from bridge.policies import PolicyServer, RemotePolicy, evaluate, serve_policy


def served(model: BaseAlgorithm, port: int = 0) -> PolicyServer:
    """Serve a model's predictions."""

    def act(observations: np.ndarray) -> np.ndarray:
        actions, _ = model.predict(observations, deterministic=True)
        return actions

    return serve_policy(act, port=port)


def main() -> None:
    """Serve a model; or train one, serve it, and evaluate it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, metavar="FILE", help="what PPO's save() wrote; none: train one")
    parser.add_argument("--port", type=int, default=0, help="where the policy is served (default: any free port)")
    parser.add_argument("--steps", type=int, default=20_000, help="of the training (default: 20,000)")
    parser.add_argument("--episodes", type=int, default=20, help="of the evaluation (default: 20)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the networks are small
    if arguments.model is not None:
        server = served(PPO.load(arguments.model, device="cpu"), arguments.port)
        print(f"serving {arguments.model} at {server.url}", flush=True)
        server.wait()
        return
    model = PPO("MlpPolicy", "CartPole-v1", seed=1, device="cpu").learn(arguments.steps)
    with (
        served(model, arguments.port) as policies,
        serve_gym("CartPole-v1") as server,
        RemotePolicy(policies.url) as policy,
    ):
        print(evaluate(server.url, policy, episodes=arguments.episodes, num_envs=8))


if __name__ == "__main__":
    main()
