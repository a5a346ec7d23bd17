"""Stable-Baselines3's PPO on environments in another process.

    python examples/sb3_ppo.py --steps 50000 --episodes 16

Prints SB3's table after each rollout, and finally the mean return over some episodes. By default the server runs in
this program; use `--urls` for servers elsewhere. Needs the extra `sb3`.
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor

from bridge import make_vec_remote, serve_gym
from bridge.wrappers import SB3VecEnv


def main() -> None:
    """Train, and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--urls", nargs="+", metavar="URL", help="servers of CartPole; none: one is started here")
    parser.add_argument("--num-envs", type=int, metavar="N", help="slots; none: one for each URL, or its lanes")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--episodes", type=int, default=16, help="to evaluate on at the end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the networks are small
    with contextlib.ExitStack() as stack:
        urls = arguments.urls or [stack.enter_context(serve_gym("CartPole-v1", num_envs=8)).url]
        envs = VecMonitor(SB3VecEnv(make_vec_remote(urls, num_envs=arguments.num_envs, blocking=True)))
        model = PPO("MlpPolicy", envs, n_steps=128, batch_size=256, verbose=1, seed=1, device="cpu")
        model.learn(arguments.steps)
        mean, _ = evaluate_policy(model, envs, n_eval_episodes=arguments.episodes)
        print(f"mean return {mean:.1f} of at most 500, in {arguments.episodes} episodes after the training")
        envs.close()


if __name__ == "__main__":
    main()
