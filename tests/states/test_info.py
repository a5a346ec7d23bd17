"""`gymnasium-bridge info` says how a server would save an environment."""

from __future__ import annotations

from typing import Any

import pytest

from bridge import serve_gym
from bridge.cli import main
from tests.states_envs import REFUSED, Walk
from tests.support import stable_id


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        (Walk, {}, "saved by copy, as far as a look shows; --check-states tries it"),
        (Walk, {"isolation": "process", "num_envs": 2}, "saved by copy, as far as a look shows"),
        (REFUSED[0], {}, "none: ClassGenerator.rng is a generator that all objects of the class share"),
        (Walk, {"fps": 100.0}, "none: in real time"),
        (Walk, {"states": False}, "none: the server takes no message of states"),
        ("CartPole-v1", {"num_envs": 2, "vectorization_mode": "async"}, "none: its lanes are in other processes"),
    ],
    ids=stable_id,
)
def test_info_says_which_way_a_server_would_save(capsys: Any, kind: Any, given: dict[str, Any], told: str) -> None:
    with serve_gym(kind, **given) as server:
        assert main(["info", server.url]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("states")]
        assert told in line
        # Nothing was checked, and no world is left.
        assert main(["info", server.url, "--all"]) == 0
        assert "server.messages.states.start" not in capsys.readouterr().out


@pytest.mark.slow
def test_info_checks_states_where_it_is_asked_to(capsys: Any) -> None:
    with serve_gym(Walk) as server:
        assert main(["info", server.url, "--check-states"]) == 0
        assert "saved by copy, checked; " in capsys.readouterr().out
    with serve_gym(REFUSED[0]) as server:
        assert main(["info", server.url, "--check-states"]) == 0
        assert "none: this environment has no state that can be copied" in capsys.readouterr().out
