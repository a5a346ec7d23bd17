"""The block of docs/cluster.md that launches a fleet on Ray, with fewer servers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
CHANGES = {
    "num_envs=64,": "num_envs=2,",
    "num_envs=128": "num_envs=4",
    "cpus_per_server=0.5": "cpus_per_server=0.1",
    "    ...  # train\n": "    envs.reset(seed=0)\n    envs.close()\n",
}


def test_the_fleet_of_the_page_is_launched_scaled_and_shown(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "launch(" in block)
    for text, other in CHANGES.items():
        assert text in code
        code = code.replace(text, other)
    exec(compile(code, "cluster.md", "exec"), {})
    assert len(re.findall(r"grpc://", capsys.readouterr().out)) == 2
