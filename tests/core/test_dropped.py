"""What is dropped without `close`: its threads, sockets, ports and files end, as those of a closed one."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from bridge import Recorder, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.dial import DialListener
from bridge.perlert import serve_perlert
from bridge.policies import RemotePolicy, serve_policy
from bridge.testing import CountingEnv
from tests.parallel_envs import Relay
from tests.preloaded import run
from tests.recording_reader import read_run
from tests.support import free_port, sampled, until


def held() -> tuple[int, int, int]:
    """The threads, open files and child processes of this process."""
    gc.collect()
    process = psutil.Process()
    return threading.active_count(), process.num_fds(), len(process.children(recursive=True))


@contextlib.contextmanager
def everything_ends() -> Iterator[None]:
    """Check that what is made, used and dropped within leaves no thread, no file and no process behind."""
    before = held()
    yield
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URLs of servers, by what is spoken with them."""
    folder = tmp_path_factory.mktemp("servers")
    web = {"web": True, "openenv": True, "unix_path": str(folder / "socket")}
    with (
        serve_gym(lambda: CountingEnv(5), **web) as server,
        serve_gym(lambda: CountingEnv(5), num_envs=3) as lanes,
        serve_perlert(CountingEnv, name="count", fps=100) as perlert,
        serve_parallel(Relay) as parallel,
    ):
        (folder / "urls.txt").write_text(server.url)
        grpc, unix, ws = server.urls
        yield {
            "grpc": grpc,
            "grpcio": grpc,
            "unix": unix,
            "ws": ws,
            "openenv": ws.replace("ws", "openenv", 1),
            "perlert": perlert.url,
            "lanes": lanes.url,
            "directory": f"file://{folder}/urls.txt",
            "parallel": parallel.url,
        }


def keywords_of(way: str) -> dict[str, Any]:
    return {"transport": "grpcio"} if way == "grpcio" else {}


@pytest.mark.parametrize("way", sampled(["grpc", "grpcio", "unix", "ws", "openenv", "perlert"], 5, slow=True))
def test_a_dropped_environment_leaves_nothing_behind(urls: dict[str, str], way: str) -> None:
    make_remote(urls[way], **keywords_of(way)).close()  # what grpcio and others keep, they have now
    with everything_ends():
        env = make_remote(urls[way], **keywords_of(way))
        env.reset()
        env.step(env.action_space.sample())
        del env


WAYS = ["grpc", "grpcio", "unix", "ws", "openenv", "lanes", "directory"]
# The usual way blocks; the other one is a wrapper less, and the same below that for each of them.
USUAL = [(way, True) for way in WAYS]
OTHERS = [(way, False) for way in WAYS]


@pytest.mark.parametrize(("way", "blocking"), [*sampled(USUAL, 5, slow=True), *sampled(OTHERS, 5)])
def test_a_dropped_vector_leaves_nothing_behind(urls: dict[str, str], way: str, blocking: bool) -> None:
    more = {**keywords_of(way), "blocking": blocking, "num_envs": 3}
    make_vec_remote(urls[way], **more).close()
    with everything_ends():
        envs = make_vec_remote(urls[way], **more)
        envs.reset(seed=0)
        envs.step(np.ones(3, np.int64))
        del envs


@pytest.mark.slow
def test_a_dropped_vector_of_perlert_leaves_nothing_behind(urls: dict[str, str]) -> None:
    with everything_ends():
        envs = make_vec_remote([urls["perlert"]])
        envs.reset()
        del envs


@pytest.mark.slow
def test_dropped_spares_leave_nothing_behind(urls: dict[str, str]) -> None:
    with everything_ends():
        envs = make_vec_remote(urls["grpc"], num_envs=2, spares=[urls["grpc"]])
        envs.reset(seed=0)
        del envs


@pytest.mark.slow
def test_a_dropped_world_of_agents_leaves_nothing_behind(urls: dict[str, str]) -> None:
    with everything_ends():
        env = make_parallel_remote(urls["parallel"])
        env.reset(seed=0)
        del env


@pytest.mark.slow
def test_a_dropped_policy_leaves_nothing_behind() -> None:
    with serve_policy(lambda observations: observations) as server, everything_ends():
        policy = RemotePolicy(server.url)
        policy(np.zeros(2))
        del policy


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(
    ("scheme", "blocking"), sampled([("grpc", True), ("ws", False), ("ws", True), ("grpc", False)], 4, slow=True)
)
def test_a_dropped_vector_of_servers_that_dial_gives_its_port_back(scheme: str, blocking: bool) -> None:
    port = free_port()
    # The server is within: while nobody listens it opens and closes sockets, which are counted too.
    with everything_ends(), serve_gym(lambda: CountingEnv(5), dial=f"{scheme}://127.0.0.1:{port}"):
        for _ in range(2):  # at the same port: the second finds it free
            envs = make_vec_remote(f"listen://127.0.0.1:{port}", num_envs=2, timeout=30.0, blocking=blocking)
            envs.reset(seed=0)
            del envs
            gc.collect()
            until(lambda: is_free(port))
            until(lambda: not [each for each in threading.enumerate() if each.name == "bridge-listener"])


@pytest.mark.slow
def test_a_dropped_listener_gives_its_port_back_and_lets_waiting_servers_go() -> None:
    with everything_ends():
        listener = DialListener("listen://127.0.0.1:0", timeout=30.0)
        port = listener.port
        with serve_gym(CountingEnv, dial=f"grpc://127.0.0.1:{port}", dial_name="one"):
            assert [endpoint.name for endpoint in listener.endpoints()] == ["one"]
            gone = weakref.ref(listener)
            del listener
            until(lambda: gc.collect() >= 0 and gone() is None)
    assert is_free(port)


@pytest.mark.slow
def test_a_listener_that_a_vector_uses_stays_though_its_maker_drops_it() -> None:
    with everything_ends():
        listener = DialListener("listen://127.0.0.1:0", timeout=30.0)
        with serve_gym(lambda: CountingEnv(5), dial=f"grpc://127.0.0.1:{listener.port}"):
            envs = make_vec_remote(listener, num_envs=2, blocking=True)
            del listener
            gc.collect()
            envs.reset(seed=0)
            assert envs.step(np.array([1, 1]))[1].tolist() == [1.0, 1.0]
            del envs


@pytest.mark.slow
def test_a_dropped_recorder_writes_its_recording_to_the_end(tmp_path: Path, urls: dict[str, str]) -> None:
    with everything_ends():
        envs = Recorder(make_vec_remote(urls["grpc"], num_envs=2, blocking=True), tmp_path, observations=True)
        envs.reset(seed=0)
        for _ in range(5):
            envs.step(np.array([1, 1]))
        del envs
    until(lambda: not list(tmp_path.glob("*.arrow")) and len(list(tmp_path.glob("*.parquet"))) == 2)
    rewards = [[row["reward"] for row in rows] for _, rows in read_run(tmp_path).values()]
    assert [sum(filter(None, each)) for each in rewards] == [15.0, 15.0]


SERVERS = """
import gc
import numpy as np
from bridge import make_remote, serve_gym
from bridge.policies import RemotePolicy, serve_policy
from bridge.testing import CountingEnv

url, policy_url = serve_gym(CountingEnv).url, serve_policy(lambda observations: observations).url
gc.collect()
env = make_remote(url)
env.reset(seed=0)
print(env.step(1)[1], RemotePolicy(policy_url)(np.ones(1)))
"""


def test_a_dropped_server_serves_until_the_end_of_the_program() -> None:
    """Others use it: that its maker keeps only the URL is no reason to end it."""
    found = run("-c", SERVERS)
    assert found.stdout == "1.0 [1.]\n"
    assert found.stderr == ""
