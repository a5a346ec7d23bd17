"""PPO of skrl on environments in another process.

    python examples/skrl_ppo.py --steps 50000

Prints the mean return of the last 20 episodes after each quarter of the training. In skrl, an environment whose episode
ends begins the next one in the same step, hence `autoreset_mode="SameStep"`. Needs `pip install skrl`.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.trainers.torch import SequentialTrainer
from skrl.utils.model_instantiators.torch import categorical_model, deterministic_model

from bridge import make_vec_remote, serve_gym
from bridge.wrappers import BlockingReset

ENVS, ROLLOUT = 8, 128
NETWORK = [{"name": "net", "input": "OBSERVATIONS", "layers": [64, 64], "activations": "tanh"}]


def train(url: str, steps: int) -> None:
    """Train for a number of environment steps."""
    envs = RecordEpisodeStatistics(BlockingReset(make_vec_remote(url), autoreset_mode="SameStep"), buffer_length=20)
    env = wrap_env(envs, verbose=False)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": env.device}
    models = {
        "policy": categorical_model(**spaces, network=NETWORK, output="ACTIONS"),
        "value": deterministic_model(**spaces, network=NETWORK, output="ONE"),
    }
    cfg = PPO_CFG(rollouts=ROLLOUT, learning_epochs=4, mini_batches=4, entropy_loss_scale=0.01, value_loss_scale=0.5)
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0  # no files
    memory = RandomMemory(memory_size=ROLLOUT, num_envs=ENVS, device=env.device)
    agent = PPO(models=models, memory=memory, cfg=cfg, **spaces)
    quarter = {"timesteps": max(1, steps // ENVS // 4), "headless": True, "disable_progressbar": True}
    trainer = SequentialTrainer(env=env, agents=agent, cfg={**quarter, "close_environment_at_exit": False})
    for number in range(1, 5):
        trainer.train()
        returns = np.array(envs.return_queue)
        score = f"{returns.mean():.1f}" if len(returns) else "none yet"
        print(f"{number * quarter['timesteps'] * ENVS:8,} steps  mean return {score} of at most 500", flush=True)
    env.close()


def main() -> None:
    """Serve eight environments, and train on them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50_000)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)  # the networks are small
    with serve_gym("CartPole-v1", num_envs=ENVS) as server:
        train(server.url, arguments.steps)


if __name__ == "__main__":
    main()
