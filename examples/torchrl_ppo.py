"""TorchRL's PPO on environments in another process.

    python examples/torchrl_ppo.py --steps 50000

Prints the mean length of the episodes that ended in each batch. TorchRL resets finished environments itself, hence
`autoreset_mode="Disabled"`. Needs `pip install torchrl`.
"""

from __future__ import annotations

import argparse

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from bridge import make_vec_remote, serve_gym
from bridge.wrappers import BlockingReset

ENVS, BATCH, EPOCHS, MINIBATCH = 8, 1024, 4, 256


def train(url: str, steps: int) -> None:
    """Train for a number of environment steps."""
    envs = BlockingReset(make_vec_remote(url), autoreset_mode="Disabled")
    env = TransformedEnv(GymWrapper(envs, categorical_action_encoding=True), RewardSum())
    policy = TensorDictModule(MLP(4, 2, num_cells=[64, 64]), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        policy, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
    loss, advantage = ClipPPOLoss(actor, critic), GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    collector = Collector(env, actor, frames_per_batch=BATCH, total_frames=steps)
    for number, batch in enumerate(collector):
        for _ in range(EPOCHS):
            advantage(batch)
            rows = batch.reshape(-1)
            for some in torch.randperm(len(rows)).split(MINIBATCH):
                losses = loss(rows[some])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        ended = batch["next", "episode_reward"][batch["next", "done"]]
        score = f"{ended.mean():.1f}" if len(ended) else "none yet"
        done = min((number + 1) * BATCH, steps)
        print(f"{done:8,} steps  mean return {score} of {len(ended)} episodes, at most 500", flush=True)
    collector.shutdown()


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
