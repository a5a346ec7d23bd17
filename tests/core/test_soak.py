"""A short soak: nothing grows with the number of steps and resets."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import soak
from bridge.testing import ServerProcess


@pytest.mark.parametrize("transport", ["grpc", pytest.param("unix", marks=pytest.mark.repeat)])
@pytest.mark.slow
def test_neither_end_grows_with_steps_and_resets(transport: str, tmp_path: Path) -> None:
    with ServerProcess("CartPole-v1", "--unix-path", str(tmp_path / "s")) as server:
        url = next(url for url in server.urls if url.startswith(transport))
        samples = soak(url, server.pid, steps=4000, resets=400)
    settled = samples[3]  # the first steps load what Python loads late
    for mine, theirs in zip(settled, samples[-1], strict=True):
        assert theirs.threads <= mine.threads
        assert theirs.descriptors <= mine.descriptors
        assert theirs.memory - mine.memory < 4 * 2**20
