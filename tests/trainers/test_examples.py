"""The programs in `examples` that train with PyTorch, run as a user runs them, for a few thousand steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
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
