"""An older version of this package and today's, each in an interpreter of its own: what docs/reference.md promises.

The older one is a wheel in `tests/old_peer`. A change of the messages that it does not understand makes these
tests fail.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.testing import Proxy
from tests.old_peer.interpreter import Interpreter
from tests.places import ROOT
from tests.support import assert_identical, sampled

HERE = ROOT / "tests"
(WHEEL,) = (HERE / "old_peer").glob("*.whl")
OLD_PYTHON = HERE.parent / ".venv-old" / "bin" / "python"
PYTHON = {"old": OLD_PYTHON, "new": Path(sys.executable)}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OLD_PYTHON.exists(), reason="the older version is not installed: make .venv-old/.installed"),
    pytest.mark.parametrize(
        ("client", "server"),
        [("old", "new"), ("new", "old")],
        indirect=True,
        ids=["an old client, a new server", "a new client, an old server"],
        scope="module",
    ),
]
IMPORTS = """
import bridge, numpy as np
from bridge import errors
from bridge.wrappers import BlockingReset
from parallel_envs import Relay
from plays import *
"""


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[Path], Interpreter]]:
    """Start an interpreter of a version; all are killed in the end."""
    started: list[Interpreter] = []

    def start_one(python: Path) -> Interpreter:
        started.append(Interpreter(python))
        started[-1].run(IMPORTS)
        return started[-1]

    yield start_one
    for interpreter in started:
        interpreter.kill()


@pytest.fixture(scope="module")
def client(start: Callable[[Path], Interpreter], request: pytest.FixtureRequest) -> Interpreter:
    """The interpreter of the clients."""
    return start(PYTHON[request.param])


@pytest.fixture(scope="module")
def server(start: Callable[[Path], Interpreter], request: pytest.FixtureRequest) -> Interpreter:
    """The interpreter of the servers, and of the local environments that remote ones are held against."""
    return start(PYTHON[request.param])


@pytest.fixture
def url(client: Interpreter, server: Interpreter) -> Iterator[Callable[..., str]]:
    """Serve what an expression says, and return the URL."""

    def serve(call: str, **values: Any) -> str:
        return server.run(f"server = bridge.{call}; result = server.url", **values)

    yield serve
    server.run("server.stop()")


def test_the_two_peers_differ_in_version(client: Interpreter, server: Interpreter) -> None:
    versions = {interpreter.run("result = bridge.__version__") for interpreter in (client, server)}
    assert versions == {WHEEL.name.split("-")[1], bridge.__version__}
    assert len(versions) == 2


def test_one_environment_equals_the_local_one_in_every_space(client: Interpreter, server: Interpreter) -> None:
    for name in server.run("result = list(EVERY_SPACE)"):
        url, theirs = server.run(
            "function = of_space(name); server = bridge.serve_gym(function); result = server.url, play(function())",
            name=name,
        )
        mine = client.run("env = bridge.make_remote(url); result = play(env); env.close()", url=url)
        server.run("server.stop()")
        assert_identical(mine, theirs, name)


@pytest.mark.parametrize(("space", "slots", "lanes"), [("mixed", 2, 1), ("mixed", 3, 3), ("box_float32", 6, 2)])
def test_slots_and_lanes_equal_the_local_ones(
    client: Any, server: Any, url: Any, space: str, slots: int, lanes: int
) -> None:
    served = url("serve_gym(of_space(space), num_envs=lanes)", space=space, lanes=lanes)
    mine = client.run(
        "envs = BlockingReset(bridge.make_vec_remote(url, num_envs=slots)); result = play_vector(envs); envs.close()",
        url=served,
        slots=slots,
    )
    theirs = server.run("result = play_vector(local_vector(of_space(space), slots))", slots=slots)
    assert_identical(mine, theirs)


@pytest.mark.parametrize("served", ["", ", num_envs=3", ", thread_safe=True", ", token='a-secret-of-this-test'"])
def test_the_usual_call_equals_local_environments(client: Any, server: Any, url: Any, served: str) -> None:
    """Today's client asks first whether lanes are as good as worlds, which an older server does not know.

    The older client has no `blocking=True`, and so makes a world for each slot.
    """
    token = served if "token" in served else ""
    usual = f"bridge.make_vec_remote(url, num_envs=3, blocking=True{token})"
    if client.python == OLD_PYTHON:
        usual = f"BlockingReset(bridge.make_vec_remote(url, num_envs=3{token}))"
    address = url(f"serve_gym(of_space('mixed'){served})")
    mine = client.run(f"envs = {usual}; result = play_vector(envs); envs.close()", url=address)
    assert_identical(mine, server.run("result = play_vector(local_vector(of_space('mixed'), 3))"))


@pytest.mark.parametrize("lanes", [1, 3])
def test_episodes_that_begin_in_the_same_step_equal_local_ones(client: Any, server: Any, url: Any, lanes: int) -> None:
    """Today's client asks for their beginnings within the answer to the step, which an older server does not know."""
    served = url("serve_gym('CartPole-v1', num_envs=lanes)", lanes=lanes)
    play = """
envs.action_space.seed(3)
result = [envs.reset(seed=3)] + [envs.step(envs.action_space.sample()) for _ in range(80)]
envs.close()
"""
    mine = client.run(
        f"envs = BlockingReset(bridge.make_vec_remote(url, num_envs=3), autoreset_mode='SameStep'){play}", url=served
    )
    vector = "gymnasium.make_vec('CartPole-v1', 3, vectorization_mode='sync', vector_kwargs=modes)"
    theirs = server.run(
        f"modes = {{'autoreset_mode': gymnasium.vector.AutoresetMode.SAME_STEP}}; envs = {vector}{play}"
    )
    assert sum(int(step[2].sum()) for step in mine[1:]) > 5
    assert_identical(mine, theirs)


def test_attributes_pictures_and_methods_of_environments_are_reached(client: Any, server: Any, url: Any) -> None:
    served = url("serve_gym('CartPole-v1', num_envs=2, env_kwargs={'render_mode': 'rgb_array'})")
    gravity, masses, pictures = client.run(
        """
envs = BlockingReset(bridge.make_vec_remote(url))
envs.reset(seed=1)
gravity = envs.get_attr("gravity")
envs.set_attr("masscart", [2.0, 3.0])
result = gravity, envs.get_attr("masscart"), envs.render()
envs.close()
""",
        url=served,
    )
    local = server.run(
        "envs = gymnasium.make_vec('CartPole-v1', 2, vectorization_mode='sync', render_mode='rgb_array')"
    )
    local = server.run("envs.reset(seed=1); result = envs.render()")
    assert (gravity, masses) == ((9.8, 9.8), (2.0, 3.0))
    assert_identical(pictures, local)


def test_long_lists_arrive_whether_the_server_reads_columns_or_not(client: Any, server: Any, url: Any) -> None:
    served = url("serve_gym('CartPole-v1', num_envs=2)")
    batch = [{"x": index / 7, "ok": index % 2 == 0, "name": "a", "at": np.full(2, index)} for index in range(200)]
    found = client.run(
        """
envs = bridge.make_vec_remote(url)
envs.call("set_wrapper_attr", "called", batch)
envs.set_attr("given", [batch, batch[:20]])
result = envs.get_attr("called"), envs.get_attr("given")
envs.close()
env = bridge.make_remote(url + "?num_envs=1")
env.call("set_wrapper_attr", "called", value=batch)
env.set_attr("given", batch)
result += env.get_attr("called"), env.get_attr("given")
env.close()
""",
        url=served,
        batch=batch,
    )
    assert_identical(found, ((batch, batch), (batch, batch[:20]), batch, batch))


@pytest.mark.parametrize(
    ("serving", "joining"),
    [
        ("token='a-secret-of-this-test'", "url, token='a-secret-of-this-test'"),
        ("web=True", "url.replace('grpc://', 'ws://')"),
        ("transport='grpcio'", "url"),
        ("", "url, transport='grpcio'"),
        ("", "url, compression='gzip'"),
    ],
    ids=["a token", "WebSocket", "a server on grpcio", "a client on grpcio", "compression"],
)
def test_every_transport_carries_lanes(client: Any, server: Any, url: Any, serving: str, joining: str) -> None:
    served = url(f"serve_gym(of_space('mixed'), num_envs=2, {serving})").partition("#")[0]
    mine = client.run(
        f"envs = BlockingReset(bridge.make_vec_remote({joining})); result = play_vector(envs); envs.close()", url=served
    )
    assert_identical(mine, server.run("result = play_vector(local_vector(of_space('mixed'), 2))"))


def test_several_agents_equal_the_local_ones(client: Any, server: Any, url: Any) -> None:
    served = url("serve_parallel(lambda: Relay(distances=(3, 8, 100)))")
    mine = client.run("env = bridge.make_parallel_remote(url); result = play_agents(env); env.close()", url=served)
    assert_identical(mine, server.run("result = play_agents(Relay(distances=(3, 8, 100)))"))


def test_agents_of_both_versions_play_in_one_world(client: Interpreter, server: Interpreter, url: Any) -> None:
    served = url("serve_parallel(Relay, missing_agent='default')")
    join = "env = bridge.make_remote(url + '?world=', agent=agent)"
    for interpreter, agent in ((client, "ann"), (server, "bob")):
        interpreter.run(join, url=served, agent=agent)
    with ThreadPoolExecutor(2) as threads:
        playing = [
            threads.submit(
                interpreter.run,
                """
env.action_space.seed(1)
result = [env.reset(seed=1)]
result += until(lambda: env.step(env.action_space.sample()), lambda step: step[2] or step[3])
env.close()
""",
            )
            for interpreter in (client, server)
        ]
        ann, bob = (future.result() for future in playing)
    assert len(ann) == len(bob) == 9  # the reset, and the eight steps of an episode
    assert ann[-1][3]
    assert bob[-1][3]
    for mine, theirs in zip(ann[1:], bob[1:], strict=True):
        assert mine[0][1] == theirs[0]["place"]  # ann sees how far bob ran
        assert theirs[1] == mine[1] + 0.1


@pytest.mark.parametrize("lanes", [1, 3])
def test_real_time_goes_on_and_tells_of_ends(client: Any, url: Any, lanes: int) -> None:
    served = url("serve_gym(counting(20), num_envs=lanes, fps=100)", lanes=lanes)
    seen, fps = client.run(
        """
envs = bridge.make_vec_remote(url)
envs.reset(seed=1)
begun = np.zeros(envs.num_envs, int)
ended = np.zeros(envs.num_envs, int)
seen = [[] for _ in range(envs.num_envs)]
def step():
    rows, rewards, terminations, truncations, infos = envs.step(np.zeros(envs.num_envs, int))
    for lane, row in enumerate(rows):
        if row is not None:
            seen[lane].append(tuple(row.tolist()))
            begun[lane] = row[0]
        ended[lane] += terminations[lane] or truncations[lane]
until(step, lambda _: (ended >= 2).all() and (begun >= 3).all())
result = seen, envs.fps
envs.close()
""",
        url=served,
    )
    assert fps == 100
    for rows in seen:
        assert rows == sorted(rows)
        assert all(0 <= step <= 20 for _, step in rows)


@pytest.mark.parametrize("lanes", [1, 3])
def test_far_away_in_real_time_actions_are_applied_and_rewards_add_up(
    client: Any, server: Any, url: Any, lanes: int
) -> None:
    """The older client acts by a stream of its own; at the older server, today's waits for each answer."""
    served = url("serve_gym(lambda: Recorder(), num_envs=lanes, fps=50)", lanes=lanes)
    with contextlib.closing(Proxy(int(served.partition("#")[0].rpartition(":")[2]))) as proxy:
        proxy.delay = 0.03
        applied, returns = client.run(
            """
envs = bridge.make_vec_remote(url)
envs.reset(seed=1)
sums = np.zeros(envs.num_envs)
told = [[] for _ in range(envs.num_envs)]
count = 0
def step():
    global count, sums
    count += 1
    rows, rewards, terminations, _, infos = envs.step(np.full(envs.num_envs, count % 50))
    sums += rewards
    for lane in np.flatnonzero(terminations):
        ends = {record["episode"]: record["return"] for record in infos["episodes"][lane] or ()}
        told[lane].append((float(sums[lane]), float(rows[lane][2]), ends))
        sums[lane] = 0
    return rows
seen = until(step, lambda _: all(len(ends) >= 3 for ends in told))
result = [[float(row[1]) for row in rows if row is not None] for rows in seen], told
envs.close()
""",
            url=f"grpc://127.0.0.1:{proxy.port}",
        )
    assert len({action for rows in applied for action in rows}) > 10
    for ends in returns:
        for total, episode, records in ends:
            assert total == records[int(episode)] == 30


def test_several_agents_play_in_real_time(client: Any, url: Any) -> None:
    served = url("serve_parallel(lambda: Relay(horizon=30), fps=50)")
    transitions = client.run(
        """
env = bridge.make_parallel_remote(url, wait="next_frame")
env.reset(seed=1)
result = until(
    lambda: env.step({agent: env.action_space(agent).sample() for agent in env.agents}), lambda step: not env.agents
)
env.close()
""",
        url=served,
    )
    times = [observations["ann"][3] for observations, *_ in transitions if "ann" in observations]
    assert times == sorted(times)
    assert len(set(times)) > 1
    assert any(transitions[-1][3].values())


@pytest.mark.parametrize("lanes", sampled([2, 1], 2))
def test_servers_that_restart_in_the_other_version_and_back_are_joined_again(
    client: Interpreter, server: Interpreter, start: Callable[[Path], Interpreter], lanes: int
) -> None:
    serve = "server = bridge.serve_gym(counting(), num_envs=lanes, port=port); result = server.url, server.port"
    running = start(server.python)
    url, port = running.run(serve, lanes=lanes, port=0)
    client.run(
        """
vector = bridge.make_vec_remote(url, timeout=60)
envs = BlockingReset(vector)
def step():
    return envs.step(np.zeros(envs.num_envs, int))
envs.reset(seed=1)
""",
        url=url,
    )
    for python in (server.python, client.python, server.python):
        running.kill()
        running = start(python)
        version = running.run(f"{serve}; result = bridge.__version__", lanes=lanes, port=port)
        lost, back = client.run(
            """
seen = until(step, lambda step: step[3].all())
lost = seen[-1]
seen = until(step, lambda step: (step[0][:, 1] == 3).all())
result = lost[4]["error"], (seen[-1][0], vector.remotes()[0].state)
"""
        )
        assert len(lost) == lanes
        assert back[0].tolist() == [[1, 3]] * lanes  # an environment that is as new as its server
        assert back[1] == "running"
        assert {version} == set(client.run("result = vector.server_versions"))
    client.run("envs.close()")


def test_slots_leave_a_server_that_drains(client: Any, server: Any, url: Any, tmp_path: Path) -> None:
    served = url("serve_gym(counting(5))")
    other = server.run("other = bridge.serve_gym(counting(5)); result = other.url")
    directory = tmp_path / "urls.txt"
    directory.write_text(f"{served}\n{other}\n", "utf-8")
    client.run(
        """
vector = bridge.make_vec_remote("file://" + directory, num_envs=2, timeout=60)
envs = BlockingReset(vector)
def step():
    return envs.step(np.zeros(envs.num_envs, int))
envs.reset(seed=1)
""",
        directory=str(directory),
    )
    server.run("server.drain()")
    urls = client.run(
        "until(step, lambda _: set(vector.urls) == {other}); result = vector.urls; envs.close()", other=other
    )
    assert urls == (other, other)
    server.run("other.stop()")


def test_the_conformance_check_of_one_version_passes_on_the_other(client: Any, url: Any) -> None:
    served = url("serve_gym('CartPole-v1')")
    report = client.run(
        "from bridge.testing import check_server; report = check_server(url); result = report.ok, str(report)",
        url=served,
    )
    assert report[0], report[1]
