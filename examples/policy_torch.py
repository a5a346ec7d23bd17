"""Serve a PyTorch network, and evaluate it on environments of another server.

    python examples/policy_torch.py --episodes 20

Prints the network's mean return; this one was not trained. Needs PyTorch and the extra `policy`.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from bridge import serve_gym
from bridge.policies import RemotePolicy, evaluate, serve_policy

torch.manual_seed(0)
NETWORK = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)).eval()


@torch.inference_mode()
def act(observations: np.ndarray) -> np.ndarray:
    """Choose the action with the largest output. For a network on a GPU, give the tensor's device."""
    logits = NETWORK(torch.as_tensor(observations))
    return logits.argmax(-1).cpu().numpy()


def main() -> None:
    """Serve the policy and the environments, and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=20, help="how many (default: 20)")
    arguments = parser.parse_args()
    with serve_gym("CartPole-v1") as server, serve_policy(act) as policies, RemotePolicy(policies.url) as policy:
        print(evaluate(server.url, policy, episodes=arguments.episodes, num_envs=8))


if __name__ == "__main__":
    main()
