"""A short run of the chaos benchmark: servers and links fail while all goes on, and everything adds up."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from benchmarks.chaos import run
from benchmarks.chaos_faults import FAULTS
from benchmarks.ppo import Ppo


@pytest.mark.skipif(os.name != "posix", reason="stops processes by signals")
@pytest.mark.slow
def test_through_every_fault_everything_adds_up_and_nothing_is_left() -> None:
    report = run(9.0, servers=2, slots=4, spares=1, period=1.0, stays=1.6, seed=3)
    assert report.problems == []
    assert len(report.faults) >= len(FAULTS) - 2  # on a busy machine not all of them have their turn
    assert report.slots_back == 4
    assert report.steps_asked > 100
    assert report.episodes_lost > 0
    assert json.loads(json.dumps(report.as_dict()))["faults"] == report.faults
    assert report.left.keys() == {"connections", "worlds", "ports", "threads", "processes", "descriptors"}


def test_ppo_learns_what_is_rewarded_though_slots_come_and_go() -> None:
    rng = np.random.default_rng(0)
    ppo = Ppo(8, 2, 3, seed=0, batch=200)
    rows = [rng.random(3) for _ in range(8)]
    for _ in range(300):
        actions = ppo.act(rows)
        after = [rng.random(3) if rng.random() < 0.9 else None for _ in rows]
        ended = rng.random(8) < 0.1
        ppo.see(rows, after, (actions == 2).astype(float), ended)
        rows = [None if over else row for row, over in zip(after, ended, strict=True)]
        rows = [rng.random(3) if row is None and rng.random() < 0.5 else row for row in rows]
    assert ppo.updates > 3
    chosen = np.concatenate([ppo.act([rng.random(3) for _ in range(8)]) for _ in range(50)])
    assert (chosen == 2).mean() > 0.8
