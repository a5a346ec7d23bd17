"""The programs in `examples` that need no trainer, run as a user runs them.

The others are run by tests/trainers and tests/ray.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import ROOT
from tests.preloaded import run as run_program

EXAMPLES = ROOT / "examples"
ELSEWHERE = {
    "tests/game/test_example.py": {"game_loop.py"},
    "tests/trainers/test_lost_servers.py": {"ppo.py"},
    "tests/trainers/test_examples.py": {
        "sb3_ppo.py",
        "torchrl_ppo.py",
        "skrl_ppo.py",
        "policy_sb3.py",
        "policy_torch.py",
        "tensorboard_report.py",
    },
    "tests/ray/test_examples.py": {"ray_training.py"},
    "tests/trainers/test_rllib.py": {"rllib_ppo.py"},
}


def run(name: str, *arguments: str | Path) -> str:
    """Run an example in a process of its own, and return its output."""
    done = run_program(EXAMPLES / name, *arguments, timeout=120.0)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_minimal_plays_episodes() -> None:
    lines = run("minimal.py", "--episodes", "2").splitlines()
    assert re.fullmatch(r"serving CartPole-v1 at grpc://127\.0\.0\.1:\d+", lines[0])
    assert [re.sub(r"\d+$", "N", line) for line in lines[1:-1]] == ["episode 0: return N", "episode 1: return N"]
    assert lines[-1] == "2 episodes were played over the network; the server has stopped"


def test_an_observer_logs_episodes_to_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "episodes.csv"
    out = run("log_episodes.py", "--file", path, "--steps", "100")
    head, *rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
    assert out == f"{path} has {len(rows)} episodes\n"
    assert head == ["world", "lane", "return", "length"]
    assert {row[1] for row in rows} == {"0", "1"}
    assert all(float(row[2]) == int(row[3]) > 0 for row in rows)  # CartPole pays 1.0 a step


def test_three_clients_vote_in_a_world_of_their_own() -> None:
    out = run("voting_world.py")
    total, *others = re.findall(r"[\d.]+(?=[,\]])", out)
    assert out.startswith("3 voters played an episode: returns [")
    assert float(total) > 0
    assert others == [total] * 2


@pytest.mark.slow
def test_a_search_over_forks_solves_what_its_greedy_policy_does_not() -> None:
    greedy, searched, found = run("tree_search.py").splitlines()
    assert greedy == "greedy: return -200"
    assert re.fullmatch(r"searched: \d+ states, each of \d+ forks into 64 lanes by one message", searched)
    assert float(found.removeprefix("found: return ")) > -200


@pytest.mark.slow
def test_a_served_policy_is_called_once_a_step() -> None:
    assert re.fullmatch(
        r"50 steps of 4 environments, reward \d+: 50 calls\n",
        run("policy_numpy.py", "--num-envs", "4", "--steps", "50"),
    )


@pytest.mark.slow
def test_two_machines_play_with_a_token_and_tls_and_others_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    folder, other = tmp_path / "secrets", tmp_path / "other"
    command = [EXAMPLES / "two_machines.py", "serve", "--host", "127.0.0.2", "--port", "0", "--folder", folder]
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            assert url.startswith("grpcs://127.0.0.2:")
            played = run("two_machines.py", "play", url, "--folder", folder)
            assert re.fullmatch(rf"played an episode with the token over TLS: return \d+ at {url}\n", played)
            other.mkdir()
            (other / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
            (other / "token").write_text("a-wrong-token")
            refused = run_program(EXAMPLES / "two_machines.py", "play", url, "--folder", other, timeout=120.0)
            assert refused.returncode == 1
            assert "the token is wrong" in refused.stderr
        finally:
            server.terminate()
            server.wait(30)


@pytest.mark.slow
def test_real_time_tells_how_old_observations_are() -> None:
    out = run("real_time.py", "--seconds", "2")
    assert re.search(r"\d+ frames passed while the agent decided 30 times", out)
    assert re.search(r"(episodes ended after \[[\d, ]+\] frames|no episode ended); the running one has \d+", out)
    assert re.search(r"observations were \d+\.\d ms old", out)


@pytest.mark.slow
def test_several_agents_are_played_by_one_client_and_by_one_each() -> None:
    pytest.importorskip("mpe2")
    lines = run("multi_agent.py", "--steps", "6").splitlines()
    heads = ["one client played 2 agents for 6 steps", "2 clients played an agent each for 6 steps"]
    assert [lines[0], lines[3]] == heads
    for first in (1, 4):
        (speaker, one), (listener, other) = (line.split(": return ") for line in lines[first : first + 2])
        assert (speaker, listener) == ("  speaker_0", "  listener_0")
        assert float(one) == float(other) < 0.0  # they share their reward


@pytest.mark.slow
def test_agents_chase_a_bot_in_the_place_of_a_person() -> None:
    pytest.importorskip("mpe2")
    pytest.importorskip("websockets")
    out = run("human_against_agent.py", "--bot", "--seconds", "3", "--fps", "30")
    assert re.fullmatch(r"play at http://127\.0\.0\.1:\d+/\n.*for 3 s\nagent_0 was caught in \d+ of 90 frames\n", out)


@pytest.mark.slow
def test_a_clone_of_a_recorded_expert_plays_as_well(tmp_path: Path) -> None:
    out = run("record_and_clone.py", "--folder", tmp_path / "runs", "--episodes", "3")
    expert, clone = (float(found) for found in re.findall(r"mean return ([\d.]+)", out))
    assert expert == 500.0
    assert clone > 300.0


@pytest.mark.slow
def test_an_agent_with_a_teacher_learns_what_one_alone_does_not(tmp_path: Path) -> None:
    out = run("learn_from_takeover.py", "--seeds", "1", "--budget", "3000", "--folder", tmp_path / "runs")
    alone, helped, taught, learner, teacher = out.splitlines()
    curves = [[float(value) for value in line.partition(":")[2].split()] for line in (alone, helped)]
    assert [len(curve) for curve in curves] == [12, 12]
    assert max(curves[0]) == -200.0
    assert max(curves[1]) > -170.0
    steps = int(taught.split()[4])
    assert 200 < steps < 1500
    assert learner == f"recorded: agent:learner acted in {3000 - steps} steps"
    assert teacher == f"recorded: person:script acted in {steps} steps"


def test_a_test_runs_every_example() -> None:
    mine = set(re.findall(r"\b(\w+\.py)\"", Path(__file__).read_text(encoding="utf-8")))
    there = {path.name for path in EXAMPLES.glob("*.py")}
    for file, names in ELSEWHERE.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert {name for name in names if name in text} == names, file
    assert there <= mine
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", page, re.MULTILINE)) == there


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_head_of_an_example_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.match(r'"""[A-Z].*\.\n', text)
    assert f"    python examples/{path.name}" in text
