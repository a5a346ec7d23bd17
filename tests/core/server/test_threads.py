"""In which thread an environment lives, and how many threads a server has."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from bridge import Auth, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.errors import RemoteError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.core.server.thread_tools import FPS, THREADS, ask, health, server_threads
from tests.peers import Stream
from tests.support import sampled, server_process, until
from tests.thread_envs import (
    SLOW,
    CallbackAgents,
    DatabaseEnv,
    RecordingAgents,
    RecordingEnv,
    read_log,
)

QUICK = 110
"""Quick calls in a row."""


LIFE = {"__init__", "reset", "step", "render", "read", "call", "close", "__del__"}
"""The calls that every recording environment of a test gets."""


class Single:
    """Drives a remote environment; `Lanes` and `Agents` do the same with theirs."""

    slow_actions: Any = 1
    quick_actions: Any = 0

    def __init__(self, url: str, path: Path, **place: Any) -> None:
        self.env: Any = self.connect(url, {"log": str(path)}, **place)

    def connect(self, url: str, env_kwargs: Any, **place: Any) -> Any:
        if "?world=" in url:  # it has its arguments already
            return make_remote(url, timeout=30, **place)
        return make_remote(url, env_kwargs=env_kwargs, render_mode="rgb_array", timeout=30, **place)

    def reset(self, slow: bool = False) -> None:
        self.env.reset(seed=1, options={"slow": slow})

    def step(self, slow: bool = False) -> None:
        *_, terminated, truncated, _ = self.env.step(self.slow_actions if slow else self.quick_actions)
        if terminated or truncated:
            self.env.reset()

    def write(self) -> None:
        self.env.set_attr("speed", 3)

    def read(self) -> None:
        self.env.get_attr("speed")

    def call(self, seconds: float = 0.0) -> None:
        self.env.call("nap", seconds)

    def render(self) -> None:
        self.env.render()

    def exercise(self, seed: int) -> None:
        """Make slow calls and many quick ones, in a random order."""
        rng = random.Random(seed)
        self.reset()
        calls: list[Callable[[], None]] = [
            *[lambda: self.step(slow=True)] * 3,
            *[lambda: [self.step() for _ in range(QUICK)]] * 2,
            lambda: [self.read() for _ in range(QUICK)],
            *[lambda: self.call(SLOW), self.call] * 2,
            *[self.render, self.read, self.write] * 2,
            self.reset,
            lambda: self.reset(slow=True),
        ]
        rng.shuffle(calls)
        for call in calls:
            call()
            if rng.random() < 0.5:
                self.step()

    def close(self) -> None:
        self.env.close()


class Lanes(Single):
    """A world of three lanes."""

    slow_actions = np.array([0, 1, 0])
    quick_actions = np.zeros(3, np.int64)

    def connect(self, url: str, env_kwargs: Any, **place: Any) -> Any:
        if "?world=" not in url:
            place = {**place, "env_kwargs": env_kwargs, "render_mode": "rgb_array"}
        self.envs = make_vec_remote(url, timeout=30, **place)
        return BlockingReset(self.envs)

    def step(self, slow: bool = False) -> None:
        self.env.step(self.slow_actions if slow else self.quick_actions)

    def write(self) -> None:
        self.envs.set_attr("speed", 3)

    def read(self) -> None:
        self.envs.get_attr("speed")

    def call(self, seconds: float = 0.0) -> None:
        self.envs.call("nap", seconds)

    def render(self) -> None:
        self.envs.render()


class Agents(Single):
    """A world of two agents, over a connection each."""

    def connect(self, url: str, env_kwargs: Any, **place: Any) -> Any:
        if env_kwargs["log"] == ".":  # one environment, which has its log
            return make_parallel_remote(url, timeout=30)
        return make_parallel_remote(url, env_kwargs=env_kwargs, render_mode="rgb_array", timeout=30)

    def step(self, slow: bool = False) -> None:
        self.env.step({agent: int(slow and agent == "bob") for agent in self.env.agents})
        if not self.env.agents:
            self.env.reset()

    def write(self) -> None:
        pass  # PettingZoo has no such call

    def read(self) -> None:
        self.env.call("speed")
        self.env.state()


def exercise_together(*drivers: Single) -> None:
    """Let several clients make their calls at the same time."""
    failures: list[BaseException] = []

    def work(driver: Single, seed: int) -> None:
        try:
            driver.exercise(seed)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(driver, seed)) for seed, driver in enumerate(drivers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive(), "a client waits for ever"
    if failures:
        raise failures[0]


def lives(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of each environment in a log."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in read_log(path):
        found[record["env"]].append(record)
    return dict(found)


def wait_for_destruction(path: Path, environments: int) -> dict[str, list[dict[str, Any]]]:
    """Wait until every environment of a log is destroyed; return their records, also where one never is."""

    def all_gone() -> bool:
        found = lives(path)
        return len(found) >= environments and all(records[-1]["what"] == "__del__" for records in found.values())

    with contextlib.suppress(AssertionError):  # `assert_one_thread_each` says which, with all that was done to it
        until(all_gone, deadline=5.0)
    return lives(path)


def assert_one_thread_each(found: dict[str, list[dict[str, Any]]]) -> None:
    """Check that each environment was used in every way, in one thread."""
    assert found
    for records in found.values():
        seen = "".join(f"\n{record['what']:10} in {record['thread']} {record['name']}" for record in records)
        assert len({(record["pid"], record["thread"]) for record in records}) == 1, f"several threads:{seen}"
        missing = LIFE - {record["what"] for record in records}
        assert not missing, f"no {', '.join(sorted(missing))}:{seen}"


def drive(server: Any, kind: type[Single], path: Path, real_time: bool) -> dict[str, list[dict[str, Any]]]:
    """Use two worlds of a server at the same time, in real time with a spectator too; return the records of all."""
    place = {"wait": "next_frame"} if real_time else {}
    drivers: list[Single] = []
    spectators: list[Single] = []
    try:
        drivers.append(kind(server.url, path, **place))
        if real_time:
            url = f"{server.url}?world={server.worlds[0]}"
            spectators.append(kind(url, path, role="spectator", **place))
        drivers.append(kind(server.url, path, **place))
        exercise_together(*drivers, *spectators)
    finally:
        for driver in [*spectators, *drivers]:
            driver.close()
    return wait_for_destruction(path, 6 if kind is Lanes else 2)


KINDS: dict[str, tuple[type[Single], dict[str, Any]]] = {
    "single": (Single, {}),
    "lanes": (Lanes, {"num_envs": 3}),
    "agents": (Agents, {}),
    "real-time": (Single, {"fps": FPS}),
    "real-time-lanes": (Lanes, {"num_envs": 3, "fps": FPS}),
}


every_kind = pytest.mark.parametrize("name", sampled(KINDS, 2, slow=True))


def serve_kind(name: str, **more: Any) -> Any:
    kind, keywords = KINDS[name]
    if kind is Agents:
        return serve_parallel(RecordingAgents, **more)
    # In real time a spectator uses the environment in every way, too.
    return serve_gym(RecordingEnv, **keywords, auth=Auth(shared_control="fps" in keywords), **more)


@pytest.mark.slow
@every_kind
def test_an_environment_sees_one_thread_from_its_construction_to_its_destruction(name: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with serve_kind(name) as server:
        found = drive(server, KINDS[name][0], path, "fps" in KINDS[name][1])
    assert_one_thread_each(found)
    # They share the serving thread.
    records = [record for each in found.values() for record in each]
    assert {record["name"] for record in records} == {"bridge-serving"}
    assert len({record["thread"] for record in records}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(KINDS, 3, 1))
def test_an_isolated_environment_lives_in_the_main_thread_of_its_process(name: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with serve_kind(name, isolation="process") as server:
        found = drive(server, KINDS[name][0], path, "fps" in KINDS[name][1])
    assert_one_thread_each(found)
    records = [record for each in found.values() for record in each]
    assert all(record["main"] for record in records)
    processes = {record["pid"] for record in records}
    assert len(processes) == 2, "each world has a process"
    assert psutil.Process().pid not in processes


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_lanes_in_processes_of_gymnasiums_own_see_one_thread_each(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with serve_gym(RecordingEnv, num_envs=3, vectorization_mode="async") as server:
        driver = Lanes(server.url, path)
        try:
            driver.exercise(5)
        finally:
            driver.close()
        found = lives(path)
    # Gymnasium makes one more in the server's process, to see its spaces.
    stepped = {name: records for name, records in found.items() if "step" in {each["what"] for each in records}}
    assert len(stepped) == 3
    for records in found.values():
        assert len({(record["pid"], record["thread"]) for record in records}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if name != "agents"])
def test_with_thread_safe_each_world_has_a_thread_and_in_real_time_each_lane(name: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    real_time = "fps" in KINDS[name][1]
    with serve_kind(name, thread_safe=True) as server:
        found = drive(server, KINDS[name][0], path, real_time)
    assert_one_thread_each(found)
    records = [record for each in found.values() for record in each]
    assert all(record["name"].startswith("bridge-world") for record in records)
    threads = {record["thread"] for record in records}
    assert len(threads) == (len(found) if real_time else 2)


def test_one_environment_that_was_made_elsewhere_moves_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with serve_parallel(RecordingAgents(str(path), render_mode="rgb_array")) as server:
        driver = Agents(server.url, Path())
        try:
            driver.exercise(3)
        finally:
            driver.close()
    (records,) = wait_for_destruction(path, 1).values()
    here = [record for record in records if record["thread"] == threading.get_native_id()]
    rest = [record for record in records if record not in here]
    # Its attributes may be looked at before it moves, to refuse what is no environment.
    assert {record["what"] for record in here} <= {"__init__", "attribute"}
    assert records[: len(here)] == here, "it came back"
    assert {record["name"] for record in rest} == {"bridge-serving"}
    assert len({record["thread"] for record in rest}) == 1
    assert {record["what"] for record in rest} >= LIFE - {"__init__"}


def test_run_serves_in_the_thread_that_calls_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    server = serve_gym(RecordingEnv, start=False)
    runner = threading.Thread(target=server.run, kwargs={"grace": 0.0}, name="the caller")
    try:
        assert "bridge-serving" not in server_threads()
        runner.start()
        driver = Single(server.url, path)
        try:
            driver.exercise(4)
        finally:
            driver.close()
        found = wait_for_destruction(path, 1)
    finally:
        server.stop()
        if runner.ident is not None:
            runner.join(20)
    assert not runner.is_alive(), "stop() ends run()"
    assert_one_thread_each(found)
    assert {record["name"] for records in found.values() for record in records} == {"the caller"}


@pytest.mark.parametrize("thread_safe", [False, True])
def test_stop_waits_for_an_environment_that_is_being_made_and_closes_it(thread_safe: bool) -> None:
    begun, go, closed = threading.Event(), threading.Event(), threading.Event()

    class SlowStart(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            begun.set()
            assert go.wait(20)

        def close(self) -> None:
            closed.set()

    def connect() -> None:
        with pytest.raises(RemoteError):
            make_remote(server.url)

    with serve_gym(SlowStart, thread_safe=thread_safe) as server:
        threads = [threading.Thread(target=connect), threading.Thread(target=server.stop)]
        threads[0].start()
        assert begun.wait(20)
        threads[1].start()
        threads[0].join(20)  # its connection has been ended
        assert not server.ended
        go.set()
        threads[1].join(20)
        assert not threads[1].is_alive()
        assert closed.is_set()


def test_an_environment_that_stops_its_server_does_not_wait_for_another_thread_that_does() -> None:
    entered, ended = threading.Event(), list[bool]()

    class Stopping(CountingEnv):
        def step(self, action: Any) -> Any:
            entered.set()
            until(lambda: server.draining)
            server.stop()
            ended.append(server.ended)
            return super().step(action)

    def stop() -> None:
        assert entered.wait(20)
        server.stop()

    server = serve_gym(Stopping)
    stopper = threading.Thread(target=stop, name="the other thread")
    stopper.start()
    try:
        env = make_remote(server.url, timeout=20)
        env.reset()
        with pytest.raises(RemoteError):
            list(map(env.step, [0, 0]))  # the answer to the first may leave before the server ends
        env.close()
    finally:
        entered.set()
        stopper.join(20)
    assert ended == [False]


@pytest.mark.parametrize(("serve", "env"), [(serve_gym, "CartPole-v1"), (serve_parallel, CallbackAgents)])
def test_a_server_that_only_listens_serves_once_it_is_started(serve: Any, env: Any) -> None:
    with serve(env, start=False) as server:
        assert server.port > 0
        server.start()
        stream = Stream(server)
        assert ask(stream, "server.version").HasField("read_property")
        stream.close()
    with serve(env, start=False):
        pass  # it never serves, and leaves nothing behind


def test_run_on_a_started_server_says_how_to_make_one_for_it() -> None:
    with serve_gym("CartPole-v1") as server, pytest.raises(SettingError, match="start=False"):
        server.run()


DATABASES: dict[str, Any] = {
    "single": {},
    "lanes": {"num_envs": 3},
    "real-time": {"fps": FPS},
    "thread-safe": {"thread_safe": True},
    "isolated": {"isolation": "process"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(DATABASES, 2))
def test_a_database_connection_of_its_construction_works_in_every_call(name: str, tmp_path: Path) -> None:
    path, keywords = tmp_path / "log", DATABASES[name]
    kind = Lanes if "num_envs" in keywords else Single
    place = {"wait": "next_frame"} if "fps" in keywords else {}
    with serve_gym(DatabaseEnv, **keywords) as server:
        driver = kind(server.url, path, **place)
        try:
            driver.exercise(8)
            driver.env.reset()
            driver.step()
            for _ in range(3):
                driver.step(slow=True)
            if not place:
                counted = driver.envs.call("count") if isinstance(driver, Lanes) else [driver.env.call("count")]
                assert set(counted) == {4}
            driver.render()
        finally:
            driver.close()
        found = wait_for_destruction(path, 3 if kind is Lanes else 1)
    for records in found.values():
        assert "close" in {record["what"] for record in records}, "the database refused to be closed"


# The number of threads

COUNTING = """
import sys, threading
import bridge
from tests.thread_envs import CallbackAgents, CallbackEnv

if sys.argv[1] == "agents":
    server = bridge.serve_parallel(CallbackAgents, env_kwargs={"agents": 200}, agent_timeout=600)
else:
    server = bridge.serve_gym(lambda: CallbackEnv(int), fps=0.2)
print(server.url, flush=True)
for line in sys.stdin:
    names = sorted(thread.name for thread in threading.enumerate())
    print(*[name for name in names if name.startswith("bridge-")], sep=",", flush=True)
server.stop()
"""


@pytest.mark.parametrize("waiting_for", sampled(["agents", "clock"], 2))
@pytest.mark.slow
def test_200_connections_that_wait_need_no_more_threads_than_one(waiting_for: str) -> None:
    streams: list[Stream] = []
    with server_process(COUNTING, waiting_for) as (process, url), contextlib.ExitStack() as stack:
        server = SimpleNamespace(url=url)
        watched = psutil.Process(process.pid)

        def names() -> list[str]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip().split(",")

        def connect() -> None:
            stream = Stream(server, own_connection=True)
            stack.callback(stream.die)
            if waiting_for == "agents":
                stream.join()
            else:
                stream.join(wait="next_frame", role="spectator" if streams else "player")
            streams.append(stream)

        connect()
        assert names() == THREADS
        with_one = watched.num_threads()
        while len(streams) < 200:
            connect()
        if waiting_for == "clock":
            for stream in streams:
                assert stream.ask(step=pb.StepRequest()).WhichOneof("payload") == "step"  # it begins the episode
            waiting, last = streams, []
        else:
            waiting, last = streams[:-1], streams[-1:]
        most = 0
        for stream in waiting:
            stream.send(step=pb.StepRequest())
            most = max(most, watched.num_threads())
        for stream in waiting[::10]:
            health(stream.channel)  # over the same connection: what was sent before has arrived
            most = max(most, watched.num_threads())
        assert names() == THREADS
        assert most == with_one
        for stream in last:
            stream.send(step=pb.StepRequest())
        for stream in streams:
            assert stream.take().WhichOneof("payload") == "step"
        assert watched.num_threads() == with_one
