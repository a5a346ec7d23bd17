"""A world with a pacer of its own, as a user writes one: `examples/voting_world.py`."""

from __future__ import annotations

import ast
import runpy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import make_remote, serve_gym
from bridge.errors import RefusedError, SettingError
from tests.places import ROOT

EXAMPLE = ROOT / "examples" / "voting_world.py"
Voting = runpy.run_path(str(EXAMPLE))["Voting"]

PATIENCE = 30.0


def test_three_clients_vote_on_each_action() -> None:
    local = gymnasium.make("CartPole-v1")
    random = np.random.default_rng(0)
    with serve_gym("CartPole-v1", world=Voting) as server, ThreadPoolExecutor(3) as threads:
        voters = [make_remote(f"{server.url}?world=") for _ in range(3)]

        def together(*calls: Any) -> list[Any]:
            return [future.result(PATIENCE) for future in [threads.submit(*call) for call in calls]]

        for seed in (3, 4):
            expected, _ = local.reset(seed=seed)
            for observation, _ in together(*((partial(voter.reset, seed=seed),) for voter in voters)):
                np.testing.assert_array_equal(observation, expected)
            over = False
            while not over:
                votes = random.integers(0, 2, 3).tolist()
                expected, reward, terminated, truncated, _ = local.step(int(sum(votes) >= 2))
                for result in together(*((voter.step, vote) for voter, vote in zip(voters, votes, strict=True))):
                    np.testing.assert_array_equal(result[0], expected)
                    assert result[1:4] == (reward, terminated, truncated)
                over = terminated or truncated
        with pytest.raises(RefusedError, match="all of its 3 agents are taken"):
            make_remote(f"{server.url}?world=")
        together(*((voter.close,) for voter in voters))


def test_a_clock_and_a_pacer_of_one_s_own_exclude_each_other() -> None:
    with pytest.raises(SettingError, match=r"in place of fps="):
        serve_gym("CartPole-v1", world=Voting, fps=30)


def test_the_example_is_short_and_needs_public_names_alone() -> None:
    text = EXAMPLE.read_text(encoding="utf-8").partition("def play(")[0]
    code = [line for line in text.splitlines() if line.strip() and not line.strip().startswith(('"""', "#"))]
    assert len(code) <= 20
    imported = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("bridge.") for name in imported)
