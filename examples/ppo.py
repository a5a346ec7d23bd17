"""PPO in the style of CleanRL, whose training continues while servers are lost and come back.

Serve environments, on one machine or on several, and list all servers:

    gymnasium-bridge serve CartPole-v1 --num-envs 4 --port 50051
    gymnasium-bridge serve CartPole-v1 --num-envs 4 --port 50052
    python examples/ppo.py grpc://127.0.0.1:50051 grpc://127.0.0.1:50052

Kill a server, and training continues with the others; start it again at the same port, and its slots come back. A lost
slot repeats its last observation. No action made these transitions, so neither the advantages nor the updates use
them. For environments with array observations (Box) and Discrete actions. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from bridge import make_vec_remote
from bridge.wrappers import BlockingReset

STEPS = 64  # per slot, between two updates
EPOCHS, MINIBATCH = 4, 256
RATE, CLIP, ENTROPY, VALUE, MAX_NORM = 1e-3, 0.2, 0.01, 0.5, 0.5


class Agent(nn.Module):
    """A policy and a value function, with two hidden layers each."""

    def __init__(self, inputs, actions):
        super().__init__()
        self.policy, self.value = network(inputs, actions, 0.01), network(inputs, 1, 1.0)

    def forward(self, observations):
        """Return the distribution of actions, and the values, for observations (batch, inputs)."""
        return Categorical(logits=self.policy(observations)), self.value(observations).squeeze(-1)


def network(inputs, outputs, scale):
    """Return a network with orthogonal initial weights; `scale` is the gain of the last layer."""
    layers = []
    for size, after, gain in (inputs, 64, 2**0.5), (64, 64, 2**0.5), (64, outputs, scale):
        linear = nn.Linear(size, after)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def advantages(rewards, values, last_values, terminations, real, gamma=0.99, decay=0.95):
    """Return generalized advantages (steps, num_envs) of valid transitions; 0 for those that no action made.

    Args:
        rewards: The rewards from `step`, (steps, num_envs).
        values: The values of the observations before each step, (steps, num_envs).
        last_values: The values of the observations after the last step, (num_envs,).
        terminations: The terminations from `step`, (steps, num_envs).
        real: True for transitions that an action made, (steps, num_envs).
        gamma: The discount.
        decay: The lambda of generalized advantages.
    """
    after = np.vstack([values[1:], last_values[None]])
    errors = rewards + gamma * after * ~terminations - values
    found, ahead = np.zeros_like(errors), np.zeros_like(last_values)
    for step in reversed(range(len(rewards))):
        ahead = np.where(real[step], errors[step] + gamma * decay * ahead, 0.0)
        found[step] = ahead
    return found


def update(agent, optimizer, observations, actions, log_probs, gains, targets):
    """Improve the agent with a batch of transitions: arrays with one row per transition."""
    batch = observations, actions, log_probs, gains.astype(np.float32), targets.astype(np.float32)
    observations, actions, log_probs, gains, targets = map(torch.as_tensor, batch)
    for _ in range(EPOCHS):
        for some in torch.randperm(len(actions)).split(MINIBATCH):
            chances, values = agent(observations[some])
            ratio = (chances.log_prob(actions[some]) - log_probs[some]).exp()
            gain = (gains[some] - gains[some].mean()) / (gains[some].std(correction=0) + 1e-8)
            policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            value_loss = (values - targets[some]).square().mean() / 2
            loss = policy_loss + VALUE * value_loss - ENTROPY * chances.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)
            optimizer.step()


def train(envs, total_steps, seed=1):
    """Train an agent until actions have made `total_steps` transitions, and return it.

    Args:
        envs: A BlockingReset with `on_lost="continue"` in the default mode, NextStep.
        total_steps: The length of the training.
        seed: The seed of the agent, and of the environments.
    """
    torch.manual_seed(seed)
    agent = Agent(np.prod(envs.single_observation_space.shape, dtype=int), envs.single_action_space.n)
    optimizer = torch.optim.Adam(agent.parameters(), RATE, eps=1e-5)
    observations, infos = envs.reset(seed=seed)
    ended, returns = np.zeros(envs.num_envs, bool), np.zeros(envs.num_envs)
    finished, steps, start = [], 0, time.monotonic()
    while steps < total_steps:
        rows = []
        for _ in range(STEPS):
            before = observations.reshape(envs.num_envs, -1).astype(np.float32)
            with torch.no_grad():
                chances, values = agent(torch.as_tensor(before))
                actions = chances.sample()
            observations, rewards, terminations, truncations, infos = envs.step(actions.numpy())
            real = infos["valid"] & ~ended  # the step after an end begins an episode and ignores the action
            ended = terminations | truncations
            log_probs = chances.log_prob(actions).numpy()
            rows.append((before, actions.numpy(), log_probs, values.numpy(), rewards, terminations, real))
            returns += rewards
            finished += returns[ended & real].tolist()  # not episodes that a loss cut off
            returns[ended] = 0.0
        before, actions, log_probs, values, rewards, terminations, real = map(np.stack, zip(*rows, strict=True))
        with torch.no_grad():
            last = agent(torch.as_tensor(observations.reshape(envs.num_envs, -1).astype(np.float32)))[1].numpy()
        gains = advantages(rewards, values, last, terminations, real)
        if real.any():
            update(agent, optimizer, *(array[real] for array in (before, actions, log_probs, gains, gains + values)))
        steps += int(real.sum())
        optimizer.param_groups[0]["lr"] = RATE * max(0.0, 1 - steps / total_steps)
        there, speed = int(infos["valid"].sum()), steps / (time.monotonic() - start)
        score = f"{np.mean(finished[-100:]):.1f}" if finished else "none yet"
        print(f"{steps:8,} steps  mean return {score:>6}  {there} of {envs.num_envs} slots  {speed:,.0f} steps/s")
    return agent


def main():
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("urls", nargs="+", metavar="URL", help="of each server")
    parser.add_argument("--steps", type=int, default=200_000, help="transitions to train on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the agent and the environments (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the networks are small
    envs = BlockingReset(make_vec_remote(arguments.urls), on_lost="continue")
    train(envs, arguments.steps, arguments.seed)
    envs.close()


if __name__ == "__main__":
    main()
