"""Slots leave servers that drain: single environments at their episodes' ends, lanes with one counted truncation."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import Endpoint, SlotState, errors, make_vec_remote, serve_gym
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.inside import pool_of, protocol_of, remotes_of
from tests.planned_env import Episodes, Planned, planned_process
from tests.support import sampled, until

DEADLINE = 60.0
MODES = pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])


class Listed:
    """A directory whose list the test changes."""

    def __init__(self, *servers: Any) -> None:
        self.listed = [server if isinstance(server, Endpoint) else Endpoint(server.url) for server in servers]

    def endpoints(self) -> list[Endpoint]:
        return list(self.listed)


def play_until(episodes: Episodes, condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        episodes.step()


def ended(server: Any) -> bool:
    return bool(server.ended)


def vector(urls: Any, num_envs: int, **more: Any) -> tuple[Any, Episodes]:
    envs = BlockingReset(make_vec_remote(urls, num_envs=num_envs, timeout=DEADLINE, **more))
    return envs, Episodes(envs)


# How draining is announced


@pytest.mark.slow
@pytest.mark.parametrize("how", ["goaway", "directory", "health", "grpcio", "websocket"])
@pytest.mark.parametrize("lanes", sampled([1, 4], 2, 1))
def test_slots_leave_a_server_that_says_that_it_drains(lanes: int, how: str) -> None:
    transport: Any = "grpcio" if how in ("health", "grpcio") else "http2"
    with (
        serve_gym(Planned, num_envs=lanes, transport=transport, web=how == "websocket") as old,
        serve_gym(Planned, num_envs=lanes) as new,
    ):
        url = old.urls[-1]
        directory = Listed(Endpoint(url))
        envs, episodes = vector(directory, 8)
        assert set(envs.env.urls) == {url}
        for _ in range(30):
            episodes.step()
        directory.listed.append(Endpoint(new.url))
        if how == "directory":
            directory.listed[0] = Endpoint(old.url, draining=True)
        elif how == "health":  # as behind a proxy, which keeps a GOAWAY to itself
            old._connections._health.enter_graceful_shutdown()
        else:
            old.drain(600.0)
        play_until(episodes, lambda: set(envs.env.urls) == {new.url})
        if how in ("goaway", "grpcio"):
            until(lambda: ended(old), DEADLINE)
        for _ in range(200):
            episodes.step()
        episodes.check_counts()
        assert not episodes.lost.any()
        assert (episodes.moved.sum() > 0) == (lanes > 1)
        assert (episodes.moved <= 1).all()
        assert sum(report.moves for report in envs.env.remotes()) == 8 // lanes
        envs.close()


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.slow
def test_spares_take_over_from_a_server_that_drains(lanes: int) -> None:
    with (
        serve_gym(Planned, num_envs=lanes) as old,
        serve_gym(Planned, num_envs=lanes) as other,
        serve_gym(Planned, num_envs=lanes) as new,
    ):
        envs, episodes = vector([old.url, other.url], 2 * lanes, spares=[new.url])
        play_until(episodes, lambda: envs.env.remotes()[-1].state == "spare")
        old.drain(600.0)
        play_until(episodes, lambda: old.url not in envs.env.urls)
        until(lambda: ended(old), DEADLINE)
        assert set(envs.env.urls) == {other.url, new.url}
        for _ in range(200):
            episodes.step()
        episodes.check_counts()
        assert not episodes.lost.any()
        assert envs.env.remotes()[-1].url == old.url  # its place as a spare
        assert envs.env.remotes()[-1].losses == 0
        with serve_gym(Planned, num_envs=lanes, port=old.port):
            play_until(episodes, lambda: envs.env.remotes()[-1].state == "spare")
            envs.close()


@pytest.mark.slow
def test_a_spare_leaves_a_server_that_drains_and_comes_back() -> None:
    with serve_gym(Planned) as one, serve_gym(Planned) as other:
        envs, episodes = vector([one.url], 1, spares=[other.url])
        play_until(episodes, lambda: envs.env.remotes()[-1].state == "spare")
        other.drain(600.0)
        play_until(episodes, lambda: ended(other))
        with serve_gym(Planned, port=other.port):
            play_until(episodes, lambda: envs.env.remotes()[-1].state == "spare")
        envs.close()


def test_who_cannot_go_elsewhere_asks_for_no_health() -> None:
    with serve_gym(Planned) as server:
        for more, asks in (({}, False), ({"spares": [server.url]}, True)):
            envs, episodes = vector([server.url], 1, **more)
            while not episodes.whole.all():
                episodes.step()
            (remote,) = remotes_of(envs)
            assert (protocol_of(remote)._watch is not None) == asks
            envs.close()


# Worlds of one environment


def test_nothing_is_cut_and_the_next_episode_is_elsewhere() -> None:
    with serve_gym(lambda: CountingEnv(50)) as old, serve_gym(lambda: CountingEnv(7)) as new:
        envs = make_vec_remote(Listed(old, new), num_envs=1, timeout=DEADLINE)
        blocking = BlockingReset(envs)
        blocking.reset()
        action = np.zeros(1, np.int64)
        for _ in range(10):
            blocking.step(action)
        old.drain(600.0)
        until(lambda: old.draining)
        steps = 10
        while not (result := blocking.step(action))[2].any():
            assert not result[3].any()
            steps += 1
            assert envs.urls == (old.url,)
        assert steps + 1 == 50
        assert blocking.step(action)[0].tolist() == [[1, 0]]
        assert envs.urls == (new.url,)
        until(lambda: ended(old), DEADLINE)
        envs.close()


@MODES
@pytest.mark.parametrize("lanes", [1, 2])
def test_every_autoreset_mode_moves(mode: str, lanes: int) -> None:
    with (
        serve_gym(lambda: CountingEnv(6), num_envs=lanes) as old,
        serve_gym(lambda: CountingEnv(6), num_envs=lanes) as new,
    ):
        directory = Listed(old)
        envs = BlockingReset(make_vec_remote(directory, num_envs=2, timeout=DEADLINE), autoreset_mode=mode)
        envs.reset()
        directory.listed.append(Endpoint(new.url))
        old.drain(600.0)
        moved, deadline = np.zeros(2, np.int64), time.monotonic() + DEADLINE
        ends: list[int] = []
        count = 0
        while set(envs.env.urls) != {new.url} or count < 60:
            assert time.monotonic() < deadline
            _, rewards, terminations, truncations, infos = envs.step(np.zeros(2, np.int64))
            count += 1
            here = infos.get("moved", np.zeros(2, bool))
            assert (truncations == here).all()
            moved += here
            if terminations[0]:
                ends.append(int(rewards[0]))
            if mode == "Disabled" and (terminations | truncations).any():
                observations, _ = envs.reset(options={"reset_mask": terminations | truncations})
                assert (observations[terminations | truncations, 1] == 0).all()
        assert set(ends) == {6}  # the reward of an episode's last step
        assert moved.tolist() in ([[0, 0]] if lanes == 1 else [[0, 0], [1, 1]])  # 0: they happened to end together
        until(lambda: ended(old), DEADLINE)
        envs.close()


def test_a_reset_in_the_midst_of_an_episode_moves_too() -> None:
    with serve_gym(lambda: CountingEnv(1000)) as old, serve_gym(lambda: CountingEnv(1000)) as new:
        directory = Listed(old)
        envs = make_vec_remote(directory, num_envs=2, timeout=DEADLINE)
        blocking = BlockingReset(envs)
        blocking.reset()
        directory.listed.append(Endpoint(new.url))
        old.drain(600.0)
        deadline = time.monotonic() + DEADLINE
        while set(envs.urls) != {new.url}:
            assert time.monotonic() < deadline
            observations, infos = blocking.reset(seed=5)
            assert observations[:, 1].tolist() == [0, 0]
        assert infos["seed"].tolist() == [5, 6]
        until(lambda: ended(old), DEADLINE)
        envs.close()


@pytest.mark.slow
def test_without_a_free_endpoint_a_slot_stays_until_the_server_ends_and_is_lost_then() -> None:
    with serve_gym(Planned) as old, serve_gym(Planned) as full:
        envs, episodes = vector(Listed(Endpoint(old.url, slots=4), Endpoint(full.url, slots=2)), 6)
        assert sorted(envs.env.urls) == sorted([old.url] * 4 + [full.url] * 2)
        old.drain(600.0)
        play_until(
            episodes,
            lambda: all(each.draining for each in remotes_of(envs) if each.url == old.url),
        )
        for _ in range(300):
            episodes.step()
        assert not episodes.lost.any()
        assert not episodes.moved.any()
        assert episodes.whole.all()
        mine = np.array([url == old.url for url in envs.env.urls])
        old.drain(0.0)
        until(lambda: ended(old), DEADLINE)
        full.stop()
        with serve_gym(Planned, port=old.port), serve_gym(Planned, port=full.port):
            play_until(episodes, lambda: (episodes.lost >= mine).all())
            for _ in range(100):
                episodes.step()
            assert (episodes.lost <= 1).all()
            episodes.check_counts()
            envs.close()


@pytest.mark.parametrize("on_lost", ["wait", "raise", "continue"])
def test_a_replacement_that_goes_is_no_loss(on_lost: Any) -> None:
    """The next endpoint takes the slot, whatever becomes of lost ones: it was between two episodes."""
    with (
        socket.socket() as closed,
        serve_gym(lambda: CountingEnv(40)) as old,
        serve_gym(lambda: CountingEnv(40)) as new,
    ):
        closed.bind(("127.0.0.1", 0))
        dead = Endpoint(f"grpc://127.0.0.1:{closed.getsockname()[1]}", slots=1)
        directory = Listed(old)
        envs = BlockingReset(make_vec_remote(directory, num_envs=1, timeout=DEADLINE), on_lost=on_lost)
        envs.reset()
        directory.listed += [dead, Endpoint(new.url)]
        policy = pool_of(envs).policy
        watch = policy.placement.watch
        until(lambda: watch.poll(time.monotonic(), soon=True) or len(watch.endpoints) == 3)
        # Without a look ahead its next episode begins at the one that is not there.
        policy.look_at = time.monotonic() + DEADLINE
        old.drain(600.0)
        until(lambda: old.draining)
        truncated = 0
        for _ in range(100):
            truncated += envs.step(np.zeros(1, np.int64))[3].sum()
        assert truncated == 0
        assert envs.env.urls == (new.url,)
        envs.close()


def test_an_endpoint_that_nobody_serves_takes_no_slot_from_a_server_that_drains() -> None:
    with socket.socket() as closed, serve_gym(Planned) as old, serve_gym(Planned) as new:
        closed.bind(("127.0.0.1", 0))
        dead = Endpoint(f"grpc://127.0.0.1:{closed.getsockname()[1]}")
        directory = Listed(old)
        envs, episodes = vector(directory, 4)
        directory.listed += [dead]
        old.drain(600.0)
        for _ in range(100):
            episodes.step()
        directory.listed += [Endpoint(new.url)]
        play_until(episodes, lambda: set(envs.env.urls) == {new.url})
        assert not episodes.lost.any()
        episodes.check_counts()
        envs.close()


# Worlds of lanes


def test_the_step_with_which_lanes_move_is_real_and_every_lane_says_so_once() -> None:
    with (
        serve_gym(lambda: CountingEnv(1 << 30), num_envs=3) as old,
        serve_gym(lambda: CountingEnv(1 << 30), num_envs=3) as new,
    ):
        directory = Listed(old)
        envs = make_vec_remote(directory, num_envs=3, timeout=DEADLINE)
        envs.reset()
        deadline = time.monotonic() + DEADLINE
        draining = False
        cuts, last = [], np.zeros(3)
        while len(cuts) < 20:
            assert time.monotonic() < deadline
            rows, rewards, terminations, truncations, infos = envs.step(np.zeros(3, np.int64))
            assert not terminations.any()
            if rows[0] is None:
                assert (infos["slot_state"] != SlotState.RUNNING).all()
                continue
            steps = np.array([row[1] for row in rows])
            if truncations.any():
                assert truncations.all()
                assert infos["moved"].tolist() == infos["_moved"].tolist() == [True] * 3
                assert [own["moved"] for own in infos["n"]] == [True] * 3
                assert "error" not in infos
                assert (steps == last + 1).all()
                assert (rewards == steps).all()
            else:
                assert "moved" not in infos
            if cuts or truncations.any():
                cuts.append(bool(truncations.any()))
            last = steps
            if not draining:
                draining = True
                directory.listed.append(Endpoint(new.url))
                old.drain(600.0)
        assert cuts == [True] + [False] * 19
        assert set(envs.urls) == {new.url}
        until(lambda: ended(old), DEADLINE)
        envs.close()


def test_lanes_move_with_recv_too() -> None:
    with (
        serve_gym(lambda: CountingEnv(1 << 30), num_envs=2) as old,
        serve_gym(lambda: CountingEnv(1 << 30), num_envs=2) as other,
        serve_gym(lambda: CountingEnv(1 << 30), num_envs=2) as new,
    ):
        directory = Listed(old, other)
        envs = BlockingReset(make_vec_remote(directory, num_envs=4, timeout=DEADLINE))
        envs.reset()
        mine = np.array([url == old.url for url in envs.env.urls])
        directory.listed.append(Endpoint(new.url))
        old.drain(600.0)
        envs.send(np.zeros(4, np.int64))
        moved, deadline = np.zeros(4, np.int64), time.monotonic() + DEADLINE
        for _ in range(1000):
            assert time.monotonic() < deadline
            slots, observations, _, _, truncations, infos = envs.recv(at_least=2)
            here = infos.get("moved", np.zeros(len(slots), bool))
            assert (truncations == here).all()
            moved[slots] += here
            envs.send(np.zeros(len(slots), np.int64), slots)
            if moved.any() and old.url not in envs.env.urls and (observations[:, 1] > 5).all():
                break
        assert moved.tolist() == mine.astype(int).tolist()
        until(lambda: ended(old), DEADLINE)
        envs.close()


def test_lanes_of_a_real_time_world_move() -> None:
    with (
        serve_gym(lambda: CountingEnv(10_000), num_envs=2, fps=200) as old,
        serve_gym(lambda: CountingEnv(10_000), num_envs=2, fps=200) as new,
    ):
        directory = Listed(old)
        envs = BlockingReset(make_vec_remote(directory, num_envs=2, timeout=DEADLINE))
        envs.reset()
        directory.listed.append(Endpoint(new.url))
        old.drain(600.0)
        moved, deadline = np.zeros(2, np.int64), time.monotonic() + DEADLINE
        while not moved.any():
            assert time.monotonic() < deadline
            *_, truncations, infos = envs.step(np.zeros(2, np.int64))
            moved += infos.get("moved", np.zeros(2, bool))
            assert (truncations == infos.get("moved", np.zeros(2, bool))).all()
        assert moved.tolist() == [1, 1]
        for _ in range(5):
            assert not envs.step(np.zeros(2, np.int64))[3].any()
        assert set(envs.env.urls) == {new.url}
        until(lambda: ended(old), DEADLINE)
        envs.close()


def test_a_replacement_with_another_number_of_lanes_takes_no_slots() -> None:
    with (
        serve_gym(Planned, num_envs=2) as old,
        serve_gym(Planned, num_envs=3) as wrong,
        serve_gym(Planned, num_envs=2) as new,
    ):
        directory = Listed(old)
        envs, episodes = vector(directory, 2)
        directory.listed.append(Endpoint(wrong.url))
        old.drain(600.0)
        for _ in range(100):
            episodes.step()
        directory.listed.append(Endpoint(new.url))
        play_until(episodes, lambda: set(envs.env.urls) == {new.url})
        episodes.check_counts()
        envs.close()


# Lost, and found elsewhere


def test_a_slot_that_is_lost_between_calls_has_moved_by_the_next_one() -> None:
    """The thread that works between calls connects it elsewhere before its loop is told of the loss."""
    with serve_gym(Planned) as old, serve_gym(Planned) as new:
        envs, episodes = vector(Listed(Endpoint(old.url, slots=1), Endpoint(new.url)), 2)
        mine = np.array([url == old.url for url in envs.env.urls])
        old.stop()
        until(lambda: old.url not in envs.env.urls, DEADLINE)
        for _ in range(50):
            episodes.step()
        assert episodes.lost.tolist() == mine.astype(int).tolist()
        episodes.check_counts()
        envs.close()


# Rolling updates


@pytest.mark.slow
@pytest.mark.parametrize("lanes", sampled([1, 4], 2))
def test_a_rolling_update_cuts_no_single_episode_and_counts_each_lane(tmp_path: Path, lanes: int) -> None:
    """Three servers in processes are replaced one after the other: SIGTERM, a new port, the file of URLs rewritten."""
    file = tmp_path / "urls.txt"
    with ExitStack() as stack:
        running = [stack.enter_context(planned_process(lanes)) for _ in range(3)]
        file.write_text("\n".join(url for _, url in running))
        envs, episodes = vector(f"file://{file}", 12)
        before = set(envs.env.urls)
        assert before == {url for _, url in running}
        for _ in range(3):
            running.append(stack.enter_context(planned_process(lanes)))
            process, _ = running.pop(0)
            file.write_text("\n".join(url for _, url in running))
            process.send_signal(signal.SIGTERM)
            play_until(episodes, lambda process=process: process.poll() is not None)
            assert process.returncode == 0
        whole = episodes.whole.copy()
        play_until(episodes, lambda: (episodes.whole > whole).all())
        assert not set(envs.env.urls) & before, "each slot is on a new server"
        episodes.check_counts()
        assert not episodes.lost.any()
        moves = sum(report.moves for report in envs.env.remotes())
        assert moves >= 12 // lanes
        assert episodes.moved.any() == (lanes > 1)
        envs.close()


def test_too_little_room_is_an_error_and_never_a_move() -> None:
    with serve_gym(Planned) as one, serve_gym(Planned) as other:
        directory = Listed(Endpoint(one.url, slots=2), Endpoint(other.url, slots=3))
        with pytest.raises(errors.SettingError, match=r"num_envs=6 slots, got room for 5 on 2"):
            make_vec_remote(directory, num_envs=6)
