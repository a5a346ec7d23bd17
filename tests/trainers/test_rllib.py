"""The example with RLlib: PPO on environments of a fleet."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.cluster import ray_cluster

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "rllib_ppo.py"


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:Tip. In future versions of Ray:FutureWarning")
def test_ppo_of_rllib_trains_on_a_fleet() -> None:
    with ray_cluster(1) as cluster:
        done = subprocess.run(
            [sys.executable, EXAMPLE, "--iterations", "2", "--batch", "400"],
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"iteration \d: mean return [\d.]+", done.stdout)) == 2
    used = [int(found) for found in re.findall(r"  (\d+)/64 slots", done.stdout)]
    assert len(used) == 2
    assert all(used), "the runners are spread over the servers"
