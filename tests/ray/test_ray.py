"""Fleets on a real Ray cluster of three nodes of this machine: launched, lost in parts, scaled while stepped."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from bridge import TLS, Limits, SlotState, make_vec_remote
from bridge.errors import RemoteError, RemoteTimeoutError, SettingError
from bridge.fleet.ray import Fleet, attach, launch
from bridge.fleet.ray_actors import NAMESPACE
from bridge.fleet.top import Top, find_directory
from bridge.testing import make_certificates
from bridge.wrappers import BlockingReset
from tests.ray.cluster import NODE
from tests.ray.envs import varied
from tests.support import chosen


def until(condition: Callable[[], bool], deadline: float = 60.0) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "the condition did not come about in time"
        time.sleep(0.1)


def actor(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)


class Training:
    """Steps all slots with random actions, and looks at each transition."""

    def __init__(self, directory: Any, slots: int) -> None:
        self.universe = make_vec_remote(directory, num_envs=slots, timeout=120)
        self.envs = BlockingReset(self.universe)
        self.random = np.random.default_rng(0)
        self.observations, _ = self.envs.reset(seed=0)
        self.truncated = np.zeros(slots, np.int64)
        self.moved = np.zeros(slots, np.int64)
        self.finished = np.zeros(slots, np.int64)
        self.fresh = np.zeros(slots, bool)
        """Slots whose next step begins an episode."""

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            before = self.observations
            actions = self.random.integers(0, 2, self.envs.num_envs)
            self.observations, _, terminated, truncated, infos = self.envs.step(actions)
            running = ~self.fresh & ~truncated
            # Each slot goes on where it was, whatever became of its server: the next step of the same episode.
            assert (self.observations[running, 0] == before[running, 0] + 1).all()
            assert (self.observations[running, 1] == before[running, 1]).all()
            assert (self.observations[self.fresh & ~truncated, 0] == 0).all()
            assert (terminated[running] == (self.observations[running, 0] == self.observations[running, 1])).all()
            self.truncated += truncated
            self.moved += truncated & np.asarray(infos.get("moved", np.zeros(len(truncated), bool)), bool)
            self.finished += terminated
            self.fresh = terminated | truncated

    def until(self, condition: Callable[[], bool], deadline: float = 120.0) -> int:
        """Step until a condition; return how many steps that were."""
        steps, end = 0, time.monotonic() + deadline
        while not condition():
            assert time.monotonic() < end, "the condition did not come about in time"
            self.step(5)
            steps += 5
        return steps

    def add_up(self) -> tuple[int, int]:
        """Hold the counts against what was seen; return the steps that were asked for and those that were lost."""
        reports = self.universe.remotes()
        asked, received, lost = (
            sum(getattr(report, name) for report in reports) for name in ("steps_asked", "steps_received", "steps_lost")
        )
        assert asked == received + lost
        assert sum(report.episodes_moved for report in reports) == self.moved.sum()
        assert sum(report.episodes_lost for report in reports) == self.truncated.sum() - self.moved.sum()
        return asked, lost

    def all_run(self, fleet: Fleet) -> None:
        """Assert that every slot runs, at a server that is to stay."""
        assert (self.universe.slot_states == SlotState.RUNNING).all()
        staying = {endpoint.url.partition("?")[0] for endpoint in fleet.endpoints() if not endpoint.draining}
        assert {url.partition("?")[0] for url in self.universe.urls} <= staying

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.envs.close()


@pytest.mark.parametrize("lanes", chosen([1, 16], lambda lanes: lanes == 16))
def test_a_training_goes_on_while_servers_are_killed_lost_added_and_given_up(cluster: Cluster, lanes: int) -> None:
    began = time.monotonic()
    keywords: Any = {
        "num_envs": lanes,
        "slots_per_server": 16,
        "name": f"training-{lanes}",
        "limits": Limits(drain_timeout=120.0),
    }
    with launch(varied, servers=4, **keywords) as fleet, ExitStack() as stack:
        print(f"\n{lanes} lanes: 4 servers after {time.monotonic() - began:.1f} s")
        training = stack.enter_context(Training(fleet, 48))
        training.step(30)
        assert not training.truncated.any()

        # An actor is killed: its slots lose an episode each, once, and the others none.
        victim = fleet.status().servers[0]
        mine = np.array([url == victim.url.partition("?")[0] for url in training.universe.urls])
        os.kill(victim.pid, signal.SIGKILL)
        began = time.monotonic()
        training.until(lambda: fleet.status().servers[0].restarts == 1 and fleet.status().ready)
        print(f"killed: back at another address after {time.monotonic() - began:.1f} s")
        assert training.truncated.tolist() == mine.astype(int).tolist()
        training.step(20)
        training.all_run(fleet)

        # A node is lost, with the servers on it.
        victim_node = _busiest(cluster, fleet)
        cluster.add_node(**NODE)
        lost = training.truncated.copy()
        cluster.remove_node(victim_node, allow_graceful=False)
        began = time.monotonic()
        training.until(lambda: len(_nodes()) == 3)
        training.until(lambda: fleet.status().ready)
        training.step(20)
        print(
            f"node lost: {int((training.truncated - lost).sum())} slots cut, all back after "
            f"{time.monotonic() - began:.1f} s"
        )
        assert (training.truncated - lost).max() <= 2, "once, or once more where it moved to a server of the same node"
        training.all_run(fleet)

        # 4 → 6 → 3 → 2: no single environment's episode is cut, and that of a lane once, which is told. The servers
        # that are given up first have no slots; the last one has 16, which go to those that are left.
        before, moved = training.truncated.copy(), training.moved.copy()
        fleet.scale(6)
        training.until(lambda: fleet.status().ready)
        training.until(lambda: fleet.status().slots_used == 48)  # a slot that moves is on two servers for a moment
        with pytest.raises(SettingError, match="expected at least 3 servers, since clients have 48 slots"):
            fleet.scale(2)
        for servers in (3, 2):
            fleet.scale(servers, force=servers == 2)
            began = time.monotonic()
            steps = training.until(lambda: fleet.status().ready, 240.0)
            print(f"down to {servers} in {time.monotonic() - began:.1f} s, {steps} steps")
        cut, told = training.truncated - before, training.moved - moved
        reports = training.universe.remotes()
        print(f"{sum(report.moves for report in reports)} worlds moved, {int(cut.sum())} lanes cut")
        assert sum(report.moves for report in reports) >= 16 // lanes
        if lanes == 1:
            assert not cut.any()
        else:
            assert cut.tolist() == told.tolist()
            assert 0 < cut.sum() <= 16, "one world was moved, and once"
            assert sum(report.episodes_moved for report in reports) == cut.sum()
        training.step(20)
        training.all_run(fleet)
        assert training.finished.all()
        asked, lost_steps = training.add_up()
        print(f"{asked} steps asked, {lost_steps} lost, {int(training.finished.sum())} episodes finished")
    with pytest.raises(SettingError, match="no fleet"):
        attach(f"training-{lanes}")


def _actors() -> list[str]:
    return [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]


def _busiest(cluster: Cluster, fleet: Fleet) -> Any:
    """The node, of those that are not the head, with the most servers."""
    raylets = [psutil.Process(server.pid).ppid() for server in fleet.status().servers]
    return max(cluster.worker_nodes, key=lambda node: raylets.count(node.all_processes["raylet"][0].process.pid))


def _nodes() -> list[Any]:
    return [node for node in ray.nodes() if node["Alive"]]


def test_a_fleet_is_found_by_its_name_copied_and_outlives_its_launcher(cluster: Cluster) -> None:
    # The factory is larger than what Ray leaves with the process that launched: the server comes back without it.
    script = (
        "import sys, warnings; warnings.simplefilter('ignore'); import numpy as np, ray\n"
        "from bridge.fleet.ray import launch\n"
        "from bridge.testing import CountingEnv\n"
        f"ray.init(address={cluster.address!r}, log_to_driver=False)\n"
        "data = np.arange(60_000)\n"
        "launch(lambda: CountingEnv(int(data.sum() > 0) * 1000), servers=2, name='outlives', cpus_per_server=0.5)\n"
        "print('launched', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "launched" in done.stdout, done.stderr
    fleet = attach("outlives")
    try:
        for each in (fleet, copy.deepcopy(fleet), pickle.loads(pickle.dumps(fleet))):
            with each:  # leaving it ends nothing
                assert each.status().ready
        os.kill(fleet.status().servers[1].pid, signal.SIGKILL)
        until(lambda: fleet.status().servers[1].restarts == 1)
        envs = BlockingReset(make_vec_remote(fleet, num_envs=2, timeout=60))
        envs.reset(seed=0)
        envs.step(np.zeros(2, np.int64))
        assert all(server.slots_used == 1 for server in _fresh(fleet))
        with Top(find_directory(["ray://outlives"]), "ray://outlives") as top:
            assert [row.state for row in top.look().servers] == ["serving", "serving"]
        envs.close()
    finally:
        fleet.shutdown()
    with pytest.raises(SettingError, match="no fleet 'outlives'"):
        attach("outlives")
    fleet.shutdown()


def _fresh(fleet: Fleet) -> Any:
    """The servers, once their supervisor has asked each since now."""
    before = time.monotonic()
    until(lambda: time.monotonic() > before + 2.5)
    return fleet.status().servers


def test_a_supervisor_that_comes_back_knows_what_was_wanted(cluster: Cluster) -> None:
    with launch("CartPole-v1", servers=1, name="supervised", cpus_per_server=0.5) as fleet:
        fleet.scale(3)
        fleet.wait(60)
        before = {server.name: server.pid for server in fleet.status().servers}
        until(lambda: all(_remembers(name, 3) for name in before))
        ray.kill(actor("supervised"), no_restart=False)
        until(lambda: _answers(fleet))
        fleet.wait(60)
        status = fleet.status()
        assert status.wanted == 3
        assert {server.name: server.pid for server in status.servers} == before, "none was started anew"


def test_a_fleet_without_its_supervisor_is_shut_down_too(cluster: Cluster) -> None:
    fleet = launch("CartPole-v1", servers=2, name="headless", cpus_per_server=0.5)
    ray.kill(actor("headless"), no_restart=True)
    until(lambda: "headless" not in _actors())
    assert len(_actors()) == 2
    fleet.shutdown()
    until(lambda: not _actors())


def _remembers(name: str, wanted: int) -> bool:
    return bool(ray.get(actor(name).status.remote(), timeout=20)["memory"].get("wanted") == wanted)


def _answers(fleet: Fleet) -> bool:
    try:
        return bool(fleet.status().servers)
    except RemoteError:
        return False


def test_a_server_that_hangs_is_replaced(cluster: Cluster) -> None:
    with launch("CartPole-v1", servers=2, name="hangs", cpus_per_server=0.5) as fleet:
        victim = fleet.status().servers[0]
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            until(lambda: fleet.status().age > 2.0, 60.0)  # it says how old what that server said is
            until(lambda: fleet.status().servers[0].pid != victim.pid and fleet.status().ready, 90.0)
        finally:
            if psutil.pid_exists(victim.pid):
                os.kill(victim.pid, signal.SIGKILL)
        assert len(fleet.status().servers) == 2


def test_forced_scaling_puts_more_on_the_servers_that_are_left(cluster: Cluster) -> None:
    keywords: Any = {
        "slots_per_server": 4,
        "name": "forced",
        "cpus_per_server": 0.5,
        "limits": Limits(drain_timeout=60.0),
    }
    with launch(varied, servers=2, **keywords) as fleet, ExitStack() as stack:
        training = stack.enter_context(Training(fleet, 8))
        until(lambda: fleet.status().slots_used == 8)
        with pytest.raises(SettingError, match="force=True"):
            fleet.scale(1)
        fleet.scale(1, force=True)
        training.until(lambda: fleet.status().ready)
        training.step(10)
        assert not training.truncated.any()
        training.all_run(fleet)
        assert [server.slots for server in fleet.status().servers] == [8]


def is_free(port: int) -> bool:
    """Tell whether nothing listens on a port, on any address."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def test_why_further_servers_do_not_start_is_told_where_others_serve(cluster: Cluster) -> None:
    """Three nodes of one machine have one port for their metrics."""
    port = next(filter(is_free, random.sample(range(20_000, 30_000), 100)))  # below those that connections get
    with launch("CartPole-v1", servers=1, name="one-port", cpus_per_server=0.5, metrics_port=port) as fleet:
        fleet.scale(2)
        until(lambda: fleet.status().problem != "")
        with pytest.raises(RemoteTimeoutError, match=f"got 1, since .*{port}"):
            fleet.wait(3.0)
        fleet.scale(1)
        fleet.wait()
        assert fleet.status().problem == ""


def test_more_slots_than_the_fleet_carries_are_told_with_both_numbers(cluster: Cluster) -> None:
    with launch("CartPole-v1", servers=1, num_envs=2, name="small", cpus_per_server=0.5) as fleet:
        with pytest.raises(SettingError, match=r"num_envs=4 slots, got room for 2"):
            make_vec_remote(fleet, num_envs=4)
        with pytest.raises(SettingError, match="there is a fleet 'small' already"):
            launch("CartPole-v1", servers=1, name="small")


def test_strangers_without_the_token_are_refused(cluster: Cluster) -> None:
    with launch("CartPole-v1", servers=1, name="protected", cpus_per_server=0.5) as fleet:
        (endpoint,) = fleet.endpoints()
        assert "token=" in endpoint.url
        assert "token=" not in f"{endpoint!r} {fleet.status()} {fleet.status()!r}"
        with pytest.raises(RemoteError, match="token is required"):
            make_vec_remote(endpoint.url.partition("?")[0])


def test_servers_with_tls_are_watched_and_verified_by_a_name(cluster: Cluster, tmp_path: Path) -> None:
    held = make_certificates(tmp_path)
    keywords: Any = {"tls": TLS(held["server.pem"], held["server.key"]), "cpus_per_server": 0.5}
    with launch("CartPole-v1", servers=1, name="tls", **keywords) as fleet:
        until(lambda: fleet.status().servers[0].checks > 0)
        assert fleet.endpoints()[0].url.startswith("grpcs://")
        envs = BlockingReset(make_vec_remote(fleet, tls=TLS(ca=held["ca.pem"], server_name="localhost")))
        envs.reset(seed=0)
        envs.step(np.zeros(1, np.int64))
        envs.close()


def test_what_cannot_be_launched_is_told_and_leaves_nothing_behind(cluster: Cluster) -> None:
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("CartPole-v1", {"servers": 0}, SettingError, "servers to be a positive integer"),
        ("CartPole-v1", {"num_envs": 4, "slots_per_server": 6}, SettingError, "multiple of num_envs=4"),
        ("CartPole-v1", {"port": 50051}, SettingError, "port cannot be given for a fleet"),
        ("CartPole-v1", {"nothing": 1}, SettingError, "no keyword 'nothing'"),
        ("CartPole-v1", {"name": "a/b"}, SettingError, "without '/'"),
        ("NoSuchEnv-v0", {}, SettingError, "NoSuchEnv"),
        (lambda: (_ for _ in ()), {"env_kwargs": {"x": (i for i in ())}}, SettingError, "cannot be sent"),
        ("CartPole-v1", {"cpus_per_server": 1000, "timeout": 5.0}, RemoteTimeoutError, "got 0; the cluster has"),
    ]
    for env, more, kind, words in cases:
        with pytest.raises(kind, match=words):
            launch(env, **{"servers": 1, "name": "wrong", **more})
    until(lambda: not _actors())
    with pytest.raises(SettingError, match="no fleet 'nobody'"):
        attach("nobody")
