"""The README's program for Stable-Baselines3 trains, as far as is written below it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from bridge import serve_gym

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
LOCAL = "grpc://127.0.0.1:50051"


def test_the_readme_trains_with_stable_baselines3():
    ((code, first, last),) = re.findall(
        r"```python\n([^`]*stable_baselines3[^`]*)```\n\n.* from about (\d+) to about (\d+)[.;]", README
    )
    assert LOCAL in code
    with serve_gym("CartPole-v1") as server:
        code = "import torch; torch.set_num_threads(1)\n" + code.replace(LOCAL, server.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    steps, returns = zip(*re.findall(r"^(\d+) steps: mean return (\d+)$", done.stdout, re.MULTILINE), strict=True)
    assert steps == ("10240", "20480", "30720", "40960")
    # The digits of another build of PyTorch differ.
    assert abs(int(returns[0]) - int(first)) < 30
    assert int(returns[-1]) > 0.6 * int(last)
