"""The programs in `examples` that need PyTorch, run as a user runs them, for a few thousand steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def run(name: str, *arguments: str | Path) -> str:
    """Run an example in a process of its own, and return its output."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stable_baselines3_trains() -> None:
    out = run("sb3_ppo.py", "--steps", "4000", "--episodes", "8")
    assert float(re.findall(r"^mean return ([\d.]+) of at most 500", out, re.MULTILINE)[-1]) > 25.0  # 22 is random


@pytest.mark.parametrize(("name", "steps"), [("torchrl_ppo.py", "6144"), ("skrl_ppo.py", "6000")])
def test_others_train(name: str, steps: str) -> None:
    returns = [float(found) for found in re.findall(r"mean return ([\d.]+)", run(name, "--steps", steps))]
    assert len(returns) >= 3
    assert returns[-1] > returns[0]


def test_a_served_network_is_evaluated() -> None:
    assert re.match(r"5 episodes, \d+ steps in .* s\nreturn ", run("policy_torch.py", "--episodes", "5"))


def test_a_served_model_of_stable_baselines3_is_evaluated() -> None:
    out = run("policy_sb3.py", "--steps", "6000", "--episodes", "8")
    assert float(re.search(r"^return +([\d.]+) \(95 %", out, re.MULTILINE)[1]) > 25.0  # 22 is random


def test_a_saved_model_is_served(tmp_path: Path) -> None:
    policies, models = pytest.importorskip("bridge.policies"), pytest.importorskip("stable_baselines3")
    model = models.PPO("MlpPolicy", "CartPole-v1", seed=1, device="cpu")
    model.save(tmp_path / "model.zip")
    command = [sys.executable, EXAMPLES / "policy_sb3.py", "--model", tmp_path / "model.zip"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            observations = model.observation_space.sample()[None].repeat(3, axis=0)
            with policies.RemotePolicy(process.stdout.readline().split()[-1]) as policy:
                actions = policy(observations, slots=range(3))
            assert actions.tolist() == model.predict(observations, deterministic=True)[0].tolist()
        finally:
            process.kill()
            process.stdout.read()


def test_what_failures_cost_goes_to_tensorboard(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = run("tensorboard_report.py", "--steps", "200", "--every", "50", "--log-dir", tmp_path)
    written, lost = re.fullmatch(r"(\d+) values are in .*; connections lost: (\d+)\n", out).groups()
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    names = events.Tags()["scalars"]
    assert sum(len(events.Scalars(name)) for name in names) == int(written)
    losses = {point.step: point.value for point in events.Scalars("bridge/losses")}
    assert (losses[50], losses[200]) == (0.0, float(lost))
    assert int(lost) >= 4  # of the server that was stopped
    assert events.Scalars("episodes/mean_return")[-1].value > 0
    assert any(name.startswith("bridge/servers/grpc://127.0.0.1:") for name in names)
