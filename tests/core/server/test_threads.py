"""Threads of a server: each environment keeps the one that made it, and their number does not grow with connections.

The environments are in `tests/thread_envs.py`. Rendering is in `test_rendering.py`, signals are in `test_signals.py`.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bridge import Auth, Limits, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code, RefusedError, RemoteError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.inside import deputy_runs_after
from tests.peers import Stream
from tests.support import sampled, server_process, until
from tests.thread_envs import (
    SLOW,
    CallbackAgents,
    CallbackEnv,
    DatabaseEnv,
    Gate,
    MeetingEnv,
    RecordingAgents,
    RecordingEnv,
    read_log,
)
from tests.trick_envs import TrickEnv, gone

FPS = 50
QUICK = 110
"""Quick calls in a row."""
THREADS = ["bridge-deputy", "bridge-serving"]
"""All threads of a server in the default mode."""
LIFE = {"__init__", "reset", "step", "render", "read", "call", "close", "__del__"}
"""The calls that every recording environment of a test gets."""


class DozingEnv(CountingEnv):
    """Its step takes a millisecond, in which other threads run."""

    dozes = True

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        return super().step(action)


def server_threads() -> list[str]:
    """The names of this process's server threads; those of clients have other names."""
    kinds = ("bridge-serving", "bridge-deputy", "bridge-world", "bridge-helper", "bridge-server")
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(kinds))


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
            env.step(0)
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


DATABASES = {
    "single": {},
    "lanes": {"num_envs": 3},
    "real-time": {"fps": FPS},
    "thread-safe": {"thread_safe": True},
    "isolated": {"isolation": "process"},
}


@pytest.mark.slow
@pytest.mark.parametrize("keywords", DATABASES.values(), ids=list(DATABASES))
def test_a_database_connection_of_its_construction_works_in_every_call(keywords: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
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


# Answers while an environment is in a call


def act(stream: Stream, action: int) -> None:
    """Send a Step of a single environment, or of one agent."""
    ((uid, _),) = stream.specs.actions.items()
    stream.send(step=pb.StepRequest(actions={uid: pack_tensor(np.int64(action))}))


def acted(stream: Stream, action: int) -> Any:
    """Step, and return the kind of the answer."""
    act(stream, action)
    return stream.take().WhichOneof("payload")


@contextlib.contextmanager
def worlds(*servers: Any, each: int, token: str | None = None) -> Iterator[list[Stream]]:
    """Make worlds of servers, begin their episodes, and yield their streams."""
    with contextlib.ExitStack() as stack:
        streams = []
        for server in servers:
            for _ in range(each):
                stream = Stream(server, own_connection=True, token=token)
                stack.callback(stream.die)
                made = stream.ask(create_world=pb.CreateWorldRequest()).create_world
                stream.join(made.world_name)
                assert stream.ask(step=pb.StepRequest()).WhichOneof("payload") == "step"
                streams.append(stream)
        yield streams


def health(channel: grpc.Channel) -> None:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def ask(stream: Stream, key: str) -> properties_pb2.PropertyResponse:
    """Read a property."""
    request = properties_pb2.PropertyRequest(read_property={"key": key})
    extension = pb.EnvironmentRequest().extension
    extension.type_url, extension.value = PROPERTY_REQUEST_URL, request.SerializeToString()
    answer = stream.ask(extension=extension)
    assert answer.WhichOneof("payload") == "extension", answer
    return properties_pb2.PropertyResponse.FromString(answer.extension.value)


def fastest(call: Callable[[], Any]) -> float:
    """The seconds that a call takes at best; machines of tests are busy."""
    best = float("inf")
    for _ in range(20):
        began = time.monotonic()
        call()
        best = min(best, time.monotonic() - began)
        if best < 0.1:
            break
    return best


@contextlib.contextmanager
def held_step(kind: str) -> Iterator[tuple[Any, Stream, Gate]]:
    """Serve an environment and keep it in a step.

    Yield the server, a stream that is in another of its worlds, and the gate that the step waits for.
    """
    gate, token = Gate(), "secret-token"
    with contextlib.ExitStack() as stack:
        if kind == "agents":
            server = stack.enter_context(serve_parallel(lambda: CallbackAgents(1, gate), token=token))
        else:
            fps = {"fps": FPS} if kind == "real-time" else {}
            server = stack.enter_context(serve_gym(lambda: CallbackEnv(gate), **fps, token=token))
        held, other = stack.enter_context(worlds(server, each=2, token=token))
        stack.callback(gate.release.set)
        act(held, 1)
        assert gate.entered.wait(20)
        yield server, other, gate


@pytest.mark.parametrize("kind", ["single", "real-time", "agents"])
def test_what_needs_no_environment_is_answered_within_100_ms_during_a_long_step(kind: str) -> None:
    def refused() -> None:
        stranger = Stream(server, token="a wrong one")
        try:
            with pytest.raises(grpc.RpcError) as caught:
                stranger.ask(join_world=pb.JoinWorldRequest())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            stranger.close()

    def assert_quick() -> None:
        seconds = {"health": fastest(lambda: health(channel)), "a wrong token": fastest(refused)}
        for key in ("server.version", "world.name", "world.timing", "world.observation_space"):
            seconds[key] = fastest(lambda key=key: ask(other, key))
        assert all(value < 0.1 for value in seconds.values()), seconds

    with held_step(kind) as (server, other, gate), grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health(channel)  # the first call connects, which is not what is measured here
        began = time.monotonic()
        assert_quick()
        while kind == "single" and time.monotonic() < began + 5.0:
            assert not gate.release.wait(0.5)
            assert_quick()


def test_a_deputy_that_is_quicker_than_the_thread_of_the_call_gives_the_loop_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a busy machine: it has left the loop, and looks for a long call again before that thread runs."""
    deputy_runs_after(monkeypatch, 0.0)
    with (
        serve_gym(lambda: DozingEnv(1000)) as server,
        make_remote(server.url, timeout=20.0) as env,
        make_remote(server.url) as other,
    ):
        env.reset(seed=0)
        other.reset(seed=0)
        for _ in range(50):
            env.step(0)
            assert other.get_attr("dozes")


def test_requests_that_need_an_environment_are_answered_in_order_once_the_long_step_ends() -> None:
    with held_step("single") as (server, other, gate):
        act(other, 0)
        act(other, 0)
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            health(channel)
        gate.release.set()
        assert [other.take().WhichOneof("payload") for _ in range(2)] == ["step", "step"]


# Which environments are in a call at the same time


def at_the_same_time(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make calls in threads; return their results."""
    results: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        results[index] = calls[index]()

    workers = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    return results


class Inside:
    """Counts how many calls are inside at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = self.calls = 0

    def __call__(self) -> None:
        with self._lock:
            self.now += 1
            self.calls += 1
            self.most = max(self.most, self.now)
        time.sleep(SLOW / 2)  # long enough for another thread to take over the event loop
        with self._lock:
            self.now -= 1


def test_thread_safe_environments_of_two_worlds_are_in_a_step_at_the_same_time() -> None:
    barrier = threading.Barrier(2)

    def meet() -> None:
        barrier.wait(10)

    with serve_gym(lambda: CallbackEnv(meet), thread_safe=True) as server, worlds(server, each=2) as streams:
        for stream in streams:
            act(stream, 1)
        assert [stream.take().WhichOneof("payload") for stream in streams] == ["step", "step"]


def test_thread_safe_lanes_in_real_time_are_in_a_step_at_the_same_time() -> None:
    barrier = threading.Barrier(2)
    met = threading.Event()

    def meet() -> None:
        if not met.is_set():
            barrier.wait(10)
            met.set()

    with serve_gym(lambda: CallbackEnv(meet), num_envs=2, fps=FPS, thread_safe=True) as server:
        envs = make_vec_remote(server.url)
        try:
            blocking = BlockingReset(envs)
            blocking.reset()
            blocking.step(np.ones(2, np.int64))
            assert met.wait(20)
        finally:
            envs.close()


def test_other_environments_are_never_in_a_call_at_the_same_time_not_even_of_several_servers() -> None:
    inside = Inside()
    with (
        serve_gym(lambda: CallbackEnv(inside)) as one,
        serve_gym(lambda: CallbackEnv(inside), fps=FPS) as two,
        serve_parallel(lambda: CallbackAgents(1, inside)) as three,
        worlds(one, two, three, each=2) as streams,
    ):

        def several(stream: Stream) -> None:
            for _ in range(5):
                assert acted(stream, 1) == "step"

        at_the_same_time([lambda stream=stream: several(stream) for stream in streams])
        until(lambda: inside.calls >= 22)
        assert inside.most == 1


# Isolated worlds


def test_isolated_worlds_step_at_the_same_time_without_a_thread_each(tmp_path: Path) -> None:
    with (
        serve_gym(MeetingEnv, env_kwargs={"folder": str(tmp_path)}, isolation="process") as server,
        worlds(server, each=3) as streams,
    ):
        try:
            assert server_threads() == THREADS
            for stream in streams:
                act(stream, 1)
            until(lambda: len(list(tmp_path.glob("inside-*"))) == 3, deadline=20)
            assert server_threads() == THREADS
        finally:
            (tmp_path / "go").touch()
        for stream in streams:
            assert stream.take().WhichOneof("payload") == "step"


def test_a_hung_process_is_ended_by_its_timer_while_other_worlds_are_served() -> None:
    with serve_gym(TrickEnv, isolation="process", limits=Limits(call_timeout=1.0)) as server:
        bad = make_remote(server.url, env_kwargs={"trick": "loop"}, timeout=30)
        good = make_remote(server.url, timeout=30)
        try:
            bad.reset()
            good.reset()
            pid = bad.call("pid")
            bad.step(0)
            bad.step(0)
            failures: list[RemoteError] = []

            def hang() -> None:
                try:
                    bad.step(0)
                except RemoteError as error:
                    failures.append(error)

            hanging = threading.Thread(target=hang)
            hanging.start()
            steps = 0
            try:
                while hanging.is_alive():
                    good.step(0)
                    steps += 1
                    assert server_threads() == THREADS
            finally:
                hanging.join(30)
            assert steps > 20, "its world went on meanwhile"
            assert isinstance(failures[0], RefusedError)
            assert failures[0].code == Code.DEADLINE_EXCEEDED
            until(lambda: gone(pid))
            good.step(0)
        finally:
            good.close()
            bad.close()


def test_the_threads_of_a_server_end_with_it() -> None:
    before = server_threads()
    with serve_gym("CartPole-v1"):
        assert server_threads() == THREADS
    with serve_gym("CartPole-v1"), serve_gym("CartPole-v1"):
        assert server_threads() == sorted(2 * THREADS)
    assert server_threads() == before == []
