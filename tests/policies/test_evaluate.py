"""`evaluate` and `gymnasium-bridge evaluate` against loops by hand: slots, lanes, lost servers and policies."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import TLS, FileDirectory, Limits, RealTime, serve_gym
from bridge.cli import main
from bridge.cli.evaluate import EvaluationProgress
from bridge.errors import ConnectError, InvalidActionError, RemoteError, SettingError
from bridge.policies import RemotePolicy, compare, evaluate, serve_policy
from bridge.testing import VirtualClock, make_certificates
from tests.browser import in_browser, launched
from tests.counting_envs import Counts
from tests.support import until

EPISODES = 12


def act(observations):
    """Push the cart towards where the pole falls."""
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


def worse(observations):
    return (observations[:, 2] > 0).astype(np.int64)


def by_hand(policy, episodes=EPISODES, seed=5):
    env = gymnasium.make("CartPole-v1")
    returns, actions = [], []
    for number in range(episodes):
        observation, _ = env.reset(seed=seed + number)
        total, ended = 0.0, False
        while not ended:
            action = policy(observation[None])[0]
            actions.append(int(action))
            observation, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns, actions


@pytest.fixture(scope="module")
def expected():
    return by_hand(worse)[0]


@pytest.mark.parametrize("num_envs", [1, 2, 8, 64])
def test_returns_are_those_of_a_loop_by_hand_for_any_number_of_slots(num_envs, expected):
    with serve_gym("CartPole-v1") as server:
        found = evaluate(server.url, worse, episodes=EPISODES, seed=5, num_envs=num_envs)
    assert found.returns.tolist() == expected
    assert [episode.seed for episode in found.episodes] == list(range(5, 5 + EPISODES))
    assert [episode.length for episode in found.episodes] == expected
    assert found.steps == sum(expected)
    assert found.lost == []


@pytest.mark.parametrize("num_envs", [None, 4])
def test_a_directory_object_is_evaluated_as_a_list_is(num_envs, tmp_path, expected):
    with serve_gym("CartPole-v1") as first, serve_gym("CartPole-v1") as second:
        (tmp_path / "urls").write_text(f"{first.url}\n{second.url}\n")
        found = evaluate(FileDirectory(str(tmp_path / "urls")), worse, episodes=EPISODES, seed=5, num_envs=num_envs)
    assert found.returns.tolist() == expected


@pytest.mark.parametrize(("lanes", "num_envs"), [(1, None), (4, None), (4, 8), (8, 8), (16, 64)])
def test_lanes_give_the_same_as_worlds(lanes, num_envs, expected):
    with serve_gym("CartPole-v1", num_envs=lanes) as server:
        found = evaluate(server.url, worse, episodes=EPISODES, seed=5, num_envs=num_envs)
    assert found.returns.tolist() == expected


class FailsWithOneSeed(gymnasium.Wrapper):
    """A CartPole whose episodes of the seed 6 raise in their first step."""

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))

    def reset(self, *, seed=None, options=None):
        self.fails = seed == 6
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.fails:
            raise RuntimeError("the cart has lost a wheel")
        return super().step(action)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_an_episode_that_fails_again_and_again_ends_the_evaluation(num_envs):
    with (
        serve_gym(FailsWithOneSeed) as server,
        pytest.raises(RemoteError, match=r"(?s)episode 1 \(seed 6\): .*it was begun 5 times"),
    ):
        evaluate(server.url, worse, episodes=3, seed=5, num_envs=num_envs)


def test_a_served_policy_gives_the_same_actions_as_a_local_loop():
    asked = []

    def note(observations):
        actions = worse(observations)
        asked.extend(actions.tolist())
        return actions

    with serve_gym("CartPole-v1") as server, serve_policy(note) as policies, RemotePolicy(policies.url) as policy:
        found = evaluate(server.url, policy, episodes=3, seed=5)
    returns, actions = by_hand(worse, 3)
    assert found.returns.tolist() == returns
    assert asked == actions
    assert 0 < found.seconds_in_policy_network <= found.seconds_in_policy


def test_half_of_the_slots_cost_one_request():
    with serve_gym("CartPole-v1") as server, serve_policy(worse) as policies, RemotePolicy(policies.url) as policy:
        found = evaluate(server.url, policy, episodes=16, num_envs=16)
        longest = max(episode.length for episode in found.episodes)
        assert longest <= policies.calls <= 2 * longest


def test_a_policy_server_that_is_started_again_in_the_middle_changes_nothing(expected):
    stopping = threading.Event()
    calls = 0

    def note(observations):
        nonlocal calls
        calls += 1
        if calls == 20:
            stopping.set()
        return worse(observations)

    first = serve_policy(note)
    again = []

    def restart():
        assert stopping.wait(30)
        first.stop()
        again.append(serve_policy(worse, port=int(first.url.rpartition(":")[2])))

    thread = threading.Thread(target=restart)
    thread.start()
    with serve_gym("CartPole-v1") as server, RemotePolicy(first.url) as policy:
        found = evaluate(server.url, policy, episodes=EPISODES, seed=5, num_envs=4)
    thread.join()
    again[0].stop()
    assert found.returns.tolist() == expected


@contextlib.contextmanager
def started(*arguments, cwd):
    """A process of the command, and the URL that it prints."""
    command = [sys.executable, "-u", "-m", "bridge", *map(str, arguments)]
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            url = next(word for line in process.stdout for word in line.split() if "://127.0.0.1:" in word)
            yield process, url
        finally:
            process.kill()
            process.stdout.read()


@pytest.mark.slow
def test_an_environments_server_and_a_policys_server_may_be_killed(tmp_path, expected):
    (tmp_path / "mine.py").write_text("def bad(seen):\n    return (seen[:, 2] > 0).astype(int)\n")
    with contextlib.ExitStack() as stack:
        serve, policy = ("serve", "CartPole-v1", "--port", 0), ("policy", "mine:bad", "--port")
        urls, environments, policies = [], [], []
        for _ in range(2):
            process, url = stack.enter_context(started(*serve, cwd=tmp_path))
            environments.append(process)
            urls.append(url)
        process, policy_url = stack.enter_context(started(*policy, 0, cwd=tmp_path))
        policies.append(process)

        def kill(done, total):
            if done == 4:
                environments[0].kill()
            if done == 6:
                policies[0].kill()
                policies[0].wait(30)
                again, _ = stack.enter_context(started(*policy, policy_url.rpartition(":")[2], cwd=tmp_path))
                policies.append(again)

        with RemotePolicy(policy_url) as served:
            found = evaluate(urls, served, episodes=EPISODES, seed=5, timeout=3.0, progress=kill)
    assert len(policies) == 2
    assert found.returns.tolist() == expected
    assert len(found.lost) == 1


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2])
def test_episodes_of_a_lost_server_are_played_again_and_named(lost, expected):
    servers = [serve_gym("CartPole-v1") for _ in range(4)]
    calls = 0

    def stop_then(observations):
        nonlocal calls
        calls += 1
        if calls == 12:
            # The first and third URL are one half: with both of them gone, the other half plays the rest.
            for server in servers[: 2 * lost : 2]:
                server.stop(0.0)
        return worse(observations)

    found = evaluate([server.url for server in servers], stop_then, episodes=EPISODES, seed=5, timeout=3.0)
    for server in servers:
        server.stop()
    assert found.returns.tolist() == expected
    assert len(found.lost) >= lost
    assert all("(seed " in text for text in found.lost)


def test_without_any_server_left_the_evaluation_ends_with_an_error():
    server = serve_gym("CartPole-v1")

    def stop_then(observations):
        server.stop(0.0)
        return worse(observations)

    with pytest.raises(RemoteError):
        evaluate(server.url, stop_then, episodes=3, timeout=1.0)
    with pytest.raises(ConnectError):
        evaluate(server.url, worse)


class Task(gymnasium.Env):
    """Ends after as many steps as the seed says; the last info tells the success."""

    observation_space = spaces.Dict({"step": spaces.Box(0, 100, (1,), np.float32)})
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.left, self.step_of = (seed or 0) % 7 + 1, 0
        self.good = (seed or 0) % 2 == 0
        return self._seen(), {}

    def _seen(self):
        return {"step": np.array([self.step_of], np.float32)}

    def step(self, action):
        self.left -= 1
        self.step_of += 1
        ended = self.left == 0
        own = {"error": 0.5, "moved": True}  # names that the client has infos of, too
        return self._seen(), 1.0, ended, False, {**own, "is_success": self.good} if ended else own


def still(observations):
    return np.zeros((len(observations["step"]), 2), np.float32)


@pytest.mark.parametrize("num_envs", [1, 6])
def test_long_episodes_count_as_short_ones_do(num_envs):
    with serve_gym(Task) as server:
        found = evaluate(server.url, still, episodes=70, num_envs=num_envs)
    assert [episode.length for episode in found.episodes] == [number % 7 + 1 for number in range(70)]
    assert [episode.success for episode in found.episodes] == [number % 2 == 0 for number in range(70)]
    intervals = found.intervals()
    mean, low, high = intervals["return"]
    assert low < mean == 4.0 < high
    assert intervals["success"][0] == 0.5


@pytest.mark.slow
def test_a_comparison_says_whether_a_difference_is_larger_than_chance():
    with serve_gym("CartPole-v1") as server:
        differs = compare(server.url, worse, act, episodes=10, num_envs=4)
        same = compare(server.url, worse, worse, episodes=4, num_envs=4)
    assert differs.beyond_chance
    assert differs.difference[1] > 0
    assert "larger than chance" in str(differs)
    assert not same.beyond_chance
    assert same.difference == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("returned", [lambda rows: np.zeros(rows), lambda rows: np.zeros((rows, 2), np.int64)])
def test_actions_that_do_not_fit_are_told(returned):
    with (
        serve_gym("CartPole-v1") as server,
        pytest.raises(InvalidActionError, match=r"expected the policy to return int64 actions of \(1,\), got "),
    ):
        evaluate(server.url, lambda observations: returned(len(observations)), episodes=1)


def test_what_cannot_be_evaluated_is_refused():
    with pytest.raises(SettingError, match="expected episodes to be a positive integer, got 0"):
        evaluate("localhost:1", act, episodes=0)
    with pytest.raises(SettingError, match="expected a policy that takes observations, got 'random'"):
        evaluate("localhost:1", "random")
    with serve_gym("CartPole-v1") as server, pytest.raises(SettingError, match="Seed must be greater or equal to zero"):
        evaluate(server.url, act, seed=-1)


def bridge(*arguments, cwd):
    command = [sys.executable, "-m", "bridge", "evaluate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--policy", "mine:act", "--seed", "-1"), "--seed: expected a seed, an integer from 0 on, got '-1'"),
        (("--policy", "mine:act", "--web-port", "70000"), "--web-port: expected a port from 0 to 65535, got '70000'"),
        (("--policy", "mine:act", "--web-port", "0"), "--web-port: expected a port from 1 to 65535, got '0'"),
        (("--policy", "mine:act", "--execution-horizon", "0"), "expected a positive integer, got '0'"),
        (("--policy", "mine:act", "--execution-horizon", "2"), "--execution-horizon is for a policy at a URL"),
        (("--compare", "ws://a:1", "ws://b:1", "--rows"), "--rows is for a policy as MODULE:FUNCTION"),
        (("--policy", "random"), "expected a policy as its ws:// URL, or as MODULE:FUNCTION .* got 'random'"),
    ],
)
def test_options_of_the_command_that_are_none_are_refused_by_name(options, text, capsys):
    try:
        code = main(["evaluate", "localhost:1", *options])
    except SystemExit as ended:  # of argparse
        code = ended.code
    written = capsys.readouterr()
    assert code == 2
    assert re.search(text, written.err)
    assert "In a browser" not in written.err


@pytest.mark.slow
def test_the_command_evaluates_compares_and_records(tmp_path, expected):
    (tmp_path / "mine.py").write_text(
        "def good(seen):\n    return int(seen[2] + seen[3] > 0)\n\ndef bad(seen):\n    return int(seen[2] > 0)\n"
    )
    with serve_gym("CartPole-v1") as server:
        common = (server.url, "--episodes", EPISODES, "--seed", 5, "--num-envs", 4, "--rows")
        one = bridge(*common, "--policy", "mine:bad", "--json", "--record", tmp_path / "runs", cwd=tmp_path)
        assert one.returncode == 0, one.stderr
        assert [episode["total"] for episode in json.loads(one.stdout)["episodes"]] == expected
        both = bridge(*common, "--compare", "mine:bad", "mine:good", cwd=tmp_path)
        assert both.returncode == 0, both.stderr
        assert "larger than chance" in both.stdout
        assert both.stdout.startswith(f"the first: {EPISODES} episodes, ")
        assert sum(line.startswith("return ") for line in both.stdout.splitlines()) == 2
        wrong = bridge(*common, "--policy", "mine:none", cwd=tmp_path)
        assert wrong.returncode == 2
    command = [sys.executable, "-m", "bridge", "runs", str(tmp_path / "runs"), "--json"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    recorded = {item["seed"]: item["return"] for item in map(json.loads, listed) if not item["incomplete"]}
    assert [recorded[5 + number] for number in range(EPISODES)] == expected


def test_progress_is_a_line_now_and_then_in_a_file_and_a_bar_at_a_terminal(monkeypatch, capsys):
    time = [0.0]
    progress = EvaluationProgress(["the first: ", "the second: "], 8, lambda: time[0])
    for time[0], done in ((4.0, 1), (10.0, 2), (12.0, 3), (25.0, 5), (40.0, 8), (52.0, 0)):
        progress(done, 8)
    time[0] = 80.0
    progress.tell()  # as the thread does, which looks while no episode ends
    progress.tell()
    assert capsys.readouterr().err.splitlines() == [
        "gymnasium-bridge: the first: 2 of 8 episodes in 10 s, some 30 s to go",
        "gymnasium-bridge: the first: 5 of 8 episodes in 25 s, some 15 s to go",
        "gymnasium-bridge: the second: 0 of 8 episodes in 12 s",
        "gymnasium-bridge: the second: 0 of 8 episodes in 40 s",
    ]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = EvaluationProgress([""], 8)
    progress(4, 8)
    progress(8, 8)
    half, whole = "#" * 15 + " " * 15, "#" * 30
    assert capsys.readouterr().err == f"\r[{half}] 4/8 episodes\r[{whole}] 8/8 episodes\n"


def test_progress_in_a_file_is_told_while_no_episode_ends(monkeypatch):
    """An episode may take minutes."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)

    class Soon(EvaluationProgress):
        period = 0.0

    with Soon([""], 7):
        until(lambda: shown.getvalue().startswith("gymnasium-bridge: 0 of 7 episodes in "))


def certificates(folder):
    made = make_certificates(folder)
    return TLS(certificate=made["server.pem"], key=made["server.key"]), made["ca.pem"]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.slow
def test_the_command_trusts_the_ca_for_policies_too(both, tmp_path, capsys):
    own, ca = certificates(tmp_path)
    with serve_gym("CartPole-v1", tls=own if both else None) as server, serve_policy(worse, tls=own) as policies:
        assert policies.url.startswith("wss://")
        command = ["evaluate", server.url, "--episodes", "1", "--json"]
        assert main([*command, "--policy", policies.url, "--tls-ca", str(ca)]) == 0
        assert main([*command, "--compare", policies.url, policies.url, "--tls-ca", str(ca)]) == 0
        if not both:
            assert main([*command, "--policy", f"{policies.url}?tls_ca={ca}"]) == 0
            capsys.readouterr()
            with serve_policy(worse) as plain:
                assert main([*command, "--policy", plain.url, "--tls-ca", str(ca)]) == 2
            assert "for URLs with TLS" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["--timeout", "URL"])
def test_the_timeout_of_the_command_is_the_policys_too(place, capsys):
    answering = threading.Event()

    def late(observations):
        assert answering.wait(60)
        return worse(observations)

    with serve_gym("CartPole-v1") as server, serve_policy(late) as policies:
        query, option = ("?timeout=0.4", []) if place == "URL" else ("", ["--timeout", "0.4"])
        command = ["evaluate", server.url, "--episodes", "1", "--policy", policies.url + query, *option]
        try:
            assert main(command) == 1
        finally:
            answering.set()
    assert "0.4 s" in capsys.readouterr().err


class Shown(Counts):
    """Episodes of eight steps, with a picture."""

    metadata: dict[str, object] = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    length, reward, info = 8, 0.5, {"is_success": True}

    def __init__(self, render_mode=None):
        self.render_mode, self.count = render_mode, 0

    def render(self):
        return np.full((16, 16, 3), 30 * self.count, np.uint8)


@in_browser
@pytest.mark.slow
def test_a_page_shows_the_worlds_of_a_running_evaluation_and_its_results_so_far():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shown, calls = threading.Event(), 0

    def wait(observations):
        nonlocal calls
        calls += 1
        if calls > 20:  # each slot has ended its first episode, and plays its second one
            assert shown.wait(60.0)
        return np.zeros(len(observations), np.int64)

    with serve_gym(Shown, web=True) as server, launched() as browser:
        found = []
        keywords = {"episodes": 12, "num_envs": 4, "web_port": port}
        thread = threading.Thread(target=lambda: found.append(evaluate(server.url, wait, **keywords)))
        thread.start()
        try:
            page = browser.new_page()
            page.add_init_script(
                """const Own = WebSocket;
                   window.sockets = [];
                   window.WebSocket = class extends Own {
                     constructor(...given) {
                       super(...given);
                       window.sockets.push(this);
                     }
                   };"""
            )
            until(lambda: calls > 20)
            page.goto(f"http://127.0.0.1:{port}")
            page.wait_for_function(
                """() => document.getElementById("note").textContent
                         === "4 of 12 episodes, mean return 4, mean length 8, mean success 1" """
            )
            page.wait_for_function(
                """() => [...document.querySelectorAll("#mosaic canvas")].filter(({dataset}) => dataset.pictures > 0)
                         .length === 4"""
            )
            page.click("#mosaic button:nth-child(3)")
            page.wait_for_selector("#mosaic button:nth-child(3)[aria-current=true]")
            # All connections are lost: every picture goes on, and not only that which is looked at closely.
            page.evaluate(
                """() => {
                  for (const canvas of document.querySelectorAll("#mosaic canvas")) canvas.dataset.before = "";
                  for (const socket of window.sockets) socket.close();
                }"""
            )
            page.wait_for_function(
                """() => [...document.querySelectorAll("#mosaic canvas:not([data-before])")]
                         .filter(({dataset}) => dataset.pictures > 0).length === 4"""
            )
        finally:
            shown.set()
            thread.join()
    assert found[0].returns.tolist() == [4.0] * 12


class Timed(Counts):
    """Ends after ten steps; an info has the name of one that real-time worlds give."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)
    length, info = 10, {"frames": 7}


@pytest.mark.parametrize(
    ("keywords", "url", "num_envs"),
    [
        ({"limits": Limits(max_worlds=0)}, "?world=", 1),  # a robot, of which there is one
        ({}, "", 1),
        ({}, "", 3),
        ({"num_envs": 2, "vectorization_mode": "sync"}, "", 2),
    ],
)
def test_in_real_time_each_decision_has_a_frame_and_lengths_are_frames(keywords, url, num_envs):
    decisions = 0

    def count(observations):
        nonlocal decisions
        decisions += len(observations)
        return np.zeros((len(observations), 2), np.float32)

    with serve_gym(Timed, fps=100.0, **keywords) as server:
        found = evaluate(server.url + url, count, episodes=4, num_envs=num_envs)
    assert [(episode.length, episode.total) for episode in found.episodes] == [(10, 10.0)] * 4
    assert found.steps == 40
    # Fewer where the machine was slow, and frames passed without a decision.
    assert decisions <= 40


def test_with_wait_now_a_policy_decides_as_often_as_it_can():
    decisions = 0

    def count(observations):
        nonlocal decisions
        decisions += len(observations)
        return np.zeros((len(observations), 2), np.float32)

    clock = VirtualClock()
    with serve_gym(Timed, fps=100.0, realtime=RealTime(clock=clock)) as server, ThreadPoolExecutor(1) as thread:
        playing = thread.submit(evaluate, server.url, count, episodes=1, wait="now")
        until(lambda: decisions > 20)  # while no frame passes
        clock.advance(0.2)
        found = playing.result(30)
    assert [episode.length for episode in found.episodes] == [10]


def test_frames_that_pass_while_the_policy_thinks_are_told():
    clock = VirtualClock()

    def think(observations):
        clock.advance(0.02)  # two frames
        return np.zeros((len(observations), 2), np.float32)

    with serve_gym(Timed, fps=100.0, realtime=RealTime(clock=clock)) as server:
        found = evaluate(server.url, think, episodes=1, wait="now")
    assert (found.steps, found.missed) == (10, 5)
    assert "missed   5 of 10 frames" in str(found)


def test_in_lock_step_an_info_named_frames_is_the_environments_own():
    with serve_gym(Timed) as server:
        found = evaluate(server.url, lambda seen: np.zeros((len(seen), 2), np.float32), episodes=2, num_envs=2)
    assert [episode.length for episode in found.episodes] == [10, 10]
    assert found.missed == 0
    assert "missed" not in str(found)
