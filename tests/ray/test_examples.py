"""The example of a training loop on Ray, run as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "ray_training.py"


def test_the_training_loop_learns(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--slots", "16", "--generations", "6", "--cpus-per-server", "0.5"],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    returns = [float(found) for found in re.findall(r"mean return ([\d.]+)", done.stdout)]
    assert len(returns) == 6
    assert returns[-1] > 1.5 * returns[0]
    assert "2 of 2 servers serve, 16 of 16 slots used, " in done.stdout
