"""Directories of servers that come and go: where worlds are placed, and where they go when a server is lost."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import socket
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import SlotState, errors, make_vec_remote, serve_gym
from bridge.core.client.endpoints import DnsDirectory, Endpoint, EndpointWatch, FileDirectory, as_directory
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.support import objects_of, sampled, server_process, until

SERVE = """
import sys, bridge, bridge.testing
server = bridge.serve_gym(lambda: bridge.testing.CountingEnv(1_000_000), num_envs=int(sys.argv[1]), host=sys.argv[2],
                          port=int(sys.argv[3]))
print(server.url, flush=True)
server.wait(grace=0.0)
"""


class Listed:
    """A directory whose list the test changes."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.listed = list(endpoints)
        self.reads = 0

    def endpoints(self) -> list[Endpoint]:
        self.reads += 1
        return list(self.listed)


def long() -> CountingEnv:
    return CountingEnv(1_000_000)


def zeros(envs: Any) -> Any:
    return np.zeros(envs.num_envs, np.int64)


def add_up(envs: Any) -> None:
    reports = envs.remotes()
    asked, received, lost = (
        sum(getattr(report, name) for report in reports) for name in ("steps_asked", "steps_received", "steps_lost")
    )
    assert asked == received + lost


# What a directory says


def test_a_file_has_a_url_a_line_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "urls.txt"
    text = "grpc://a:1  # the first\n\n  b:2?num_envs=4\n# two\n"
    for data in (text.encode(), text.replace("\n", "\r\n").encode("utf-8-sig")):  # the latter by editors of Windows
        file.write_bytes(data)
        directory = as_directory(f"file://{file}")
        assert directory == FileDirectory(str(file))
        assert [endpoint.url for endpoint in directory.endpoints()] == ["grpc://a:1", "b:2?num_envs=4"]


def test_a_line_that_is_no_url_is_named(tmp_path: Path) -> None:
    file = tmp_path / "urls.txt"
    file.write_text("grpc://a:1\nftp://b:2\n")
    with pytest.raises(errors.AddressError, match=r"scheme 'ftp'.*line 2 of .*urls\.txt"):
        FileDirectory(str(file)).endpoints()


def test_a_name_stands_for_all_its_addresses() -> None:
    def resolve(host: str, port: int, **more: Any) -> Any:
        assert (host, port) == ("envs.example", 50051)
        return [(socket.AF_INET, 0, 0, "", ("10.0.0.1", port))] * 2 + [
            (socket.AF_INET6, 0, 0, "", ("fd00::1", port, 0, 0))
        ]

    directory = DnsDirectory("grpc+dns://envs.example:50051/CartPole-v1?num_envs=2", resolve)
    assert [endpoint.url for endpoint in directory.endpoints()] == [
        "grpc://10.0.0.1:50051/CartPole-v1?num_envs=2",
        "grpc://[fd00::1]:50051/CartPole-v1?num_envs=2",
    ]


def test_what_is_no_directory_is_none_and_a_bad_one_is_told() -> None:
    assert as_directory("grpc://a:1") is None
    assert as_directory(["grpc://a:1"]) is None
    listed = Listed()
    assert as_directory(listed) is listed
    for url, words in (
        ("file://urls.txt", "three slashes"),
        ("grpc+dns://host", "no port"),
        ("grpcs+dns://host", "no port"),
    ):
        with pytest.raises(errors.AddressError, match=words):
            as_directory(url)


def test_the_token_of_a_url_is_in_no_message_and_no_repr(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "urls.txt"
    file.write_text("http://a:1?token=hidden\n")
    shown = [repr(Endpoint("grpc://a:1?token=hidden&num_envs=2")), repr(DnsDirectory("grpc+dns://a:1?token=hidden"))]
    for urls in (f"file://{file}", "grpc+dns://no-such-name.invalid:1?token=hidden", "grpcs+dns://a?token=hidden"):
        with pytest.raises(errors.UsageError) as caught:
            make_vec_remote(urls, num_envs=1)
        shown.append(str(caught.value))
    with pytest.raises(errors.SettingError) as caught_mixture:
        make_vec_remote(["grpc://a:1?token=hidden", "perlert://a:1/b:0"])
    shown += [str(caught_mixture.value), caplog.text]
    assert not [text for text in shown if "hidden" in text]
    assert shown[0] == "Endpoint('grpc://a:1?num_envs=2', name='', draining=False, slots=None)"


def test_what_was_known_stays_when_a_directory_fails() -> None:
    class Failing(Listed):
        def endpoints(self) -> list[Endpoint]:
            if self.reads:
                self.reads += 1
                raise OSError("the name does not resolve any more")
            return super().endpoints()

    directory = Failing(Endpoint("grpc://a:1"))
    watch = EndpointWatch(directory, 1.0)
    assert watch.wait(0.0, 20.0) == (Endpoint("grpc://a:1"),)
    watch.poll(2.0)
    until(lambda: directory.reads == 2 and not readers())
    assert watch.endpoints == (Endpoint("grpc://a:1"),)
    directory.listed.clear()
    again = EndpointWatch(Listed(Endpoint("grpc://b:2")), 1.0)
    again.wait(0.0, 20.0)
    again.directory.listed.clear()  # type: ignore[attr-defined]
    again.poll(2.0)
    until(lambda: not readers())
    assert again.endpoints == (Endpoint("grpc://b:2"),)


@pytest.mark.parametrize("wrong", [Endpoint("no URL at all://"), "grpc://a:1", None])
def test_a_list_with_something_that_is_no_endpoint_counts_in_no_part(wrong: Any) -> None:
    directory = Listed(Endpoint("grpc://a:1"))
    watch = EndpointWatch(directory, 1.0)
    watch.wait(0.0, 20.0)
    directory.listed = [wrong, Endpoint("grpc://b:2", draining=True)]
    watch.poll(2.0)
    until(lambda: directory.reads == 2 and not readers())
    assert watch.endpoints == (Endpoint("grpc://a:1"),)
    assert not watch.draining


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_reads_a_directory_that_its_parent_was_reading() -> None:
    reading, gate = threading.Event(), threading.Event()

    class Slow(Listed):
        def endpoints(self) -> list[Endpoint]:
            found = super().endpoints()
            if self.reads == 2:
                reading.set()
                assert gate.wait(20.0)
            return found

    directory = Slow(Endpoint("grpc://a:1"))
    watch = EndpointWatch(directory, 1.0)
    watch.wait(0.0, 20.0)
    watch.poll(2.0)
    assert reading.wait(20.0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            directory.listed = [Endpoint("grpc://b:2")]
            watch.poll(4.0)
            until(lambda: watch.endpoints == (Endpoint("grpc://b:2"),))
            code = 0
        finally:
            os._exit(code)
    gate.set()
    assert os.waitpid(child, 0)[1] == 0
    until(lambda: not readers())


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bridge-directory"]


def test_a_directory_is_read_again_after_no_thread_could_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    directory = Listed(Endpoint("grpc://a:1"))
    watch = EndpointWatch(directory, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            watch.poll(0.0)
    assert watch.wait(1.0, 20.0) == tuple(directory.listed)


def test_a_directory_that_cannot_be_read_at_first_is_an_error(tmp_path: Path) -> None:
    missing = f"file://{tmp_path}/none.txt"
    with pytest.raises(errors.SettingError, match=r"none\.txt.*cannot be read"):
        make_vec_remote(missing, num_envs=1)
    with pytest.raises(errors.SettingError, match="at least one endpoint"):
        make_vec_remote(Listed(), num_envs=1)


# Where worlds go


def test_worlds_are_spread_over_the_endpoints() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(serve_gym(long)) for _ in range(3)]
        directory = Listed(*(Endpoint(server.url) for server in servers))
        envs = make_vec_remote(directory, num_envs=7)
        assert sorted(Counter(envs.urls).values()) == [2, 2, 3]
        one_each = make_vec_remote(directory)
        assert sorted(one_each.urls) == sorted(server.url for server in servers)
        for each in (envs, one_each):
            each.close()


def test_lanes_fill_slots_and_must_add_up() -> None:
    with serve_gym(long, num_envs=4) as one, serve_gym(long, num_envs=4) as other:
        directory = Listed(Endpoint(one.url), Endpoint(other.url))
        envs = make_vec_remote(directory, num_envs=8)
        assert Counter(envs.urls) == {one.url: 4, other.url: 4}
        envs.close()
        with pytest.raises(errors.SettingError, match="no multiple of the 4 lanes"):
            make_vec_remote(directory, num_envs=6)


def test_too_little_room_is_told_with_both_numbers() -> None:
    with serve_gym(long) as server:
        directory = Listed(Endpoint(server.url, slots=2))
        with pytest.raises(errors.SettingError, match=r"num_envs=3 slots, got room for 2"):
            make_vec_remote(directory, num_envs=3)
        envs = make_vec_remote(directory, num_envs=2)
        envs.close()


def test_an_endpoint_that_nobody_serves_is_left_out_at_the_start() -> None:
    with socket.socket() as closed, serve_gym(long) as server:
        closed.bind(("127.0.0.1", 0))
        dead = f"grpc://127.0.0.1:{closed.getsockname()[1]}"
        envs = make_vec_remote(Listed(Endpoint(dead), Endpoint(server.url)), num_envs=2)
        assert envs.urls == (server.url, server.url)
        envs.close()
        with pytest.raises(errors.ConnectError):
            make_vec_remote(Listed(Endpoint(dead)), num_envs=1)


def test_only_endpoints_with_the_same_path_and_query_stand_in_for_each_other() -> None:
    with (
        serve_gym(CountingEnv) as one,
        serve_gym(CountingEnv) as third,
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        dead = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        taken.close()
        with pytest.raises(errors.ConnectError):
            make_vec_remote(
                Listed(Endpoint(f"{dead}?kwargs.length=9"), Endpoint(f"{one.url}?kwargs.length=5")), num_envs=2
            )
        second = serve_gym(CountingEnv)
        directory = Listed(Endpoint(f"{one.url}?kwargs.length=9"), Endpoint(f"{second.url}?kwargs.length=5"))
        envs = BlockingReset(make_vec_remote(directory, num_envs=4, timeout=20), on_lost="continue")
        envs.reset(seed=0)
        assert [url.startswith(one.url) for url in envs.env.urls] == [True, False] * 2
        second.stop()
        asked = False
        while not asked:  # that one alone
            envs.step(zeros(envs))
            asked = any("no connection" in str(report.reason) for report in envs.remotes())
            assert [url.startswith(one.url) for url in envs.env.urls] == [True, False] * 2
        directory.listed.append(Endpoint(f"{third.url}?kwargs.length=5"))
        while not envs.step(zeros(envs))[4]["valid"].all():
            pass
        assert [url.startswith(third.url) for url in envs.env.urls] == [False, True] * 2
        envs.close()


@pytest.mark.slow
@pytest.mark.parametrize("lanes", sampled(["2", "1"], 2))
def test_slots_of_a_killed_server_go_to_the_others_and_each_step_is_counted(lanes: str) -> None:
    with ExitStack() as stack:
        started = [stack.enter_context(server_process(SERVE, lanes, "127.0.0.1", "0")) for _ in range(3)]
        directory = Listed(*(Endpoint(url) for _, url in started))
        envs = make_vec_remote(directory, num_envs=6, timeout=20)
        blocking = BlockingReset(envs)
        blocking.reset(seed=0)
        for _ in range(3):
            blocking.step(zeros(envs))
        process, url = started[1]
        mine = np.array([where == url for where in envs.urls])
        assert mine.any()
        process.kill()
        truncated = np.zeros(6, np.int64)
        for _ in range(30):
            truncated += blocking.step(zeros(envs))[3]
        assert truncated.tolist() == mine.astype(int).tolist(), "each of its episodes ended once, and no other"
        assert url not in envs.urls
        add_up(envs)
        envs.close()


def test_a_file_that_is_rewritten_moves_what_is_lost_to_the_new_server(tmp_path: Path) -> None:
    file = tmp_path / "urls.txt"
    with serve_gym(long) as new, server_process(SERVE, "1", "127.0.0.1", "0") as (process, url):
        file.write_text(f"{url}\n")
        envs = make_vec_remote(f"file://{file}", num_envs=2, timeout=20)
        blocking = BlockingReset(envs)
        blocking.reset(seed=0)
        file.write_text(f"{new.url}\n")
        process.kill()
        blocking.step(zeros(envs))
        blocking.step(zeros(envs))
        assert envs.urls == (new.url, new.url)
        add_up(envs)
        envs.close()


@pytest.mark.slow
def test_connections_to_servers_that_have_gone_are_freed() -> None:
    directory = Listed()
    with serve_gym(long) as first:
        directory.listed = [Endpoint(first.url)]
        envs = make_vec_remote(directory, num_envs=2, timeout=20)
        envs.reset(seed=0)

    def runs_at(url: str) -> bool:
        envs.step(zeros(envs))
        return envs.urls == (url, url) and all(envs.slot_states == SlotState.RUNNING)

    for _ in range(4):
        with serve_gym(long) as server:
            directory.listed = [Endpoint(server.url)]
            until(lambda server=server: runs_at(server.url))
    gc.collect()  # a connection and its calls refer to each other
    alive = [kind.__name__ for kind in objects_of("bridge.core.client.wire").elements()]
    assert alive.count("ClientConnection") <= 2  # the last one, and one that an error may hold
    envs.close()


@pytest.mark.slow
def test_addresses_of_a_name_change_while_it_is_stepped() -> None:
    addresses = ["127.0.0.2"]

    def resolve(host: str, port: int, **more: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in addresses]

    with server_process(SERVE, "1", "127.0.0.2", "0") as (process, url):
        port = url.rpartition(":")[2]
        directory = DnsDirectory(f"grpc+dns://envs.example:{port}", resolve)
        envs = make_vec_remote(directory, num_envs=2, timeout=20)
        blocking = BlockingReset(envs)
        blocking.reset(seed=0)
        with server_process(SERVE, "1", "127.0.0.3", port) as (_, other):
            addresses[:] = ["127.0.0.3"]
            process.kill()
            blocking.step(zeros(envs))
            blocking.step(zeros(envs))
            assert envs.urls == (other, other)
            envs.close()


def test_a_draining_endpoint_takes_no_world() -> None:
    with serve_gym(long) as one, serve_gym(long) as other:
        envs = make_vec_remote(Listed(Endpoint(one.url, draining=True), Endpoint(other.url)), num_envs=2)
        assert envs.urls == (other.url, other.url)
        envs.close()


def test_a_shallow_copy_has_connections_of_its_own_too() -> None:
    with serve_gym(long) as server:
        envs = make_vec_remote(server.url, num_envs=2)
        envs.reset()
        copy.copy(envs).close()
        assert envs.step(zeros(envs))[4]["n"] is not None
        envs.close()


def test_a_vector_over_a_directory_can_be_copied(tmp_path: Path) -> None:
    file = tmp_path / "urls.txt"
    with serve_gym(long) as server:
        file.write_text(server.url)
        envs = BlockingReset(make_vec_remote(f"file://{file}", num_envs=2))
        copied = pickle.loads(pickle.dumps(envs))
        assert copied.reset(seed=3)[0].tolist() == envs.reset(seed=3)[0].tolist()
        assert copied.spec.kwargs["urls"] == f"file://{file}"
        for each in (envs, copied):
            each.close()
