"""`gymnasium-bridge top`: what it reads of servers, what it computes, and how it looks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public_pb
from dm_env_rpc.v1.extensions import properties_pb2 as public_properties
from google.protobuf import any_pb2
from rich.console import Console

from bridge import (
    TLS,
    ClientCredentials,
    DnsDirectory,
    Endpoint,
    FileDirectory,
    Limits,
    RealTime,
    make_parallel_remote,
    make_remote,
    make_vec_remote,
    serve_gym,
    serve_parallel,
)
from bridge.cli import main
from bridge.cli.top import render
from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import AddressError, Code, EnvironmentFailedError, RefusedError, SettingError
from bridge.fleet.top import Fixed, ServerRow, Snapshot, Top, find_directory
from bridge.testing import CountingEnv, Inspector, VirtualClock, make_certificates
from bridge.wrappers import BlockingReset
from tests.parallel_envs import Relay
from tests.scripted_server import Refuse, ScriptedServer
from tests.support import everywhere, stable_id, until

SOUND = {
    **dict.fromkeys(("slots", "worlds", "connections", "steps", "episodes", "failures"), 0),
    "uptime": 1.0,
    "draining": False,
}


class Listed:
    """A directory whose list the test changes."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.listed = list(endpoints)

    def endpoints(self) -> list[Endpoint]:
        if not self.listed:
            raise OSError("the disk is gone")
        return list(self.listed)


class Foreign(ScriptedServer):
    """Has no properties."""

    def answer(self, kind: str, request: Any) -> Any:
        if kind == "extension":
            raise Refuse(int(Code.UNIMPLEMENTED), "no extension is served here")
        return super().answer(kind, request)


class Confused(ScriptedServer):
    """Says of itself what makes no sense."""

    def __init__(self, status: Any) -> None:
        super().__init__(public_pb.ActionObservationSpecs())
        array = status if isinstance(status, np.ndarray) else np.frombuffer(values.encode(status), np.uint8)
        self.status = public_pb.Tensor.FromString(pack_tensor(array).SerializeToString())

    def answer(self, kind: str, request: Any) -> Any:
        if kind != "extension":
            return super().answer(kind, request)
        read = public_properties.ReadPropertyResponse(value=self.status)
        packed = any_pb2.Any()
        packed.Pack(public_properties.PropertyResponse(read_property=read))
        return packed


def drawn(snapshot: Snapshot, rows: int | None = None, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(render(snapshot, rows, width))
    return console.export_text()


def test_a_table_in_a_file_begins_with_its_title_and_no_line_ends_with_blanks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve_gym("CartPole-v1") as server:
        assert main(["top", server.url, "--count", "3", "--interval", "0.01"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].startswith(server.url)
    assert [line for line in lines if line != line.rstrip()] == []
    assert any(line.endswith(" steps/s") for line in lines)
    assert main(["top", "grpc://127.0.0.1:1", "--count", "1"]) == 1
    assert "0 worlds, 0 slots used," in capsys.readouterr().out


def test_one_of_something_is_not_named_in_the_plural(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym("CartPole-v1") as server, contextlib.closing(make_remote(server.url)):
        assert main(["top", server.url, "--count", "1"]) == 0
    assert "\n1 world, 1 slot used, 0 episodes\n" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_told_without_a_number_of_the_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", f"file://{tmp_path}/none", "--count", "1"]) == 1
    said = f"file://{tmp_path}/none: the directory cannot be read: {tmp_path}/none: No such file or directory\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_file_that_is_no_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert main(["top", f"file://{tmp_path}/binary", "--count", "1"]) == 1
    said = capsys.readouterr().err
    assert "the directory cannot be read" in said
    assert "unexpected" not in said


@everywhere
@pytest.mark.parametrize("lanes", [1, 3])
def test_the_status_of_a_server_counts_what_was_done_also_in_worlds_that_are_gone(
    lanes: int, isolation: str | None
) -> None:
    steps = 0
    with serve_gym(lambda: CountingEnv(4), num_envs=lanes, isolation=isolation) as server:
        for worlds in (1, 2):
            envs = BlockingReset(make_vec_remote(server.url, num_envs=lanes * worlds))
            envs.reset(seed=0)
            ended = begun = 0
            for _ in range(10):
                begun = ended
                _, _, terminated, truncated, _ = envs.step(np.zeros(envs.num_envs, np.int64))
                ended += int((terminated | truncated).sum())
            assert server.status()["slots"] == lanes * worlds
            assert server.status()["worlds"] == worlds
            envs.close()
            assert begun
            steps += 10 * envs.num_envs - begun
        status = server.status()
        assert status["steps"] == steps
        assert status["episodes"] == 3 * lanes * 2
        assert (status["failures"], status["draining"]) == (0, False)


def step(envs: BlockingReset, count: int) -> None:
    for _ in range(count):
        envs.step(np.zeros(envs.num_envs, np.int64))


def test_failures_are_counted() -> None:
    def broken() -> CountingEnv:
        env = CountingEnv(4)
        env.step = None  # type: ignore[assignment]
        return env

    with serve_gym(broken) as server:
        envs = make_vec_remote(server.url)
        blocking = BlockingReset(envs, max_failures=2)
        blocking.reset(seed=0)
        with pytest.raises(EnvironmentFailedError, match="NoneType"):
            step(blocking, 5)
        assert server.status()["failures"] >= 2
        envs.close()


def test_rates_are_those_since_the_last_look() -> None:
    now = [100.0]
    with serve_gym(lambda: CountingEnv(1000), num_envs=2) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset(seed=0)
        directory = Listed(Endpoint(server.url, "first", slots=8))
        with Top(directory, "test", clock=lambda: now[0]) as top:
            (row,) = top.look().servers
            assert (row.name, row.state, row.slots, row.slots_used, row.worlds) == ("first", "serving", 8, 2, 1)
            assert row.steps_per_second is None
            for _ in range(30):
                envs.step(np.zeros(2, np.int64))
            now[0] += 4.0
            (row,) = top.look().servers
            assert row.steps_per_second == 15.0
            now[0] += 4.0
            snapshot = top.look()
            assert snapshot.servers[0].steps_per_second == 0.0
            assert snapshot.history == (15.0, 0.0)
            directory.listed.clear()
            snapshot = top.look()
            assert snapshot.problem == "the disk is gone"
            assert len(snapshot.servers) == 1
        envs.close()


@pytest.mark.slow
def test_servers_that_cannot_be_asked_are_rows_with_the_reason() -> None:
    with ExitStack() as stack:
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        protected = stack.enter_context(serve_gym("CartPole-v1", token="secret"))
        scripted = stack.enter_context(Foreign(public_pb.ActionObservationSpecs()))
        good = stack.enter_context(serve_gym("CartPole-v1"))
        urls = [f"grpc://127.0.0.1:{each.getsockname()[1]}" for each in (closed, silent)]
        urls += [protected.url, scripted.url, good.url, f"{protected.url}?token=secret"]
        with Top(Fixed(tuple(urls)), " ".join(urls), timeout=1.0) as top:
            rows = top.look().servers
            snapshot = top.look()
    assert [row.state for row in rows] == ["unreachable", "silent", "refused", "refused", "serving", "serving"]
    assert "no property server.status" in rows[3].problem
    assert "token" in rows[2].problem
    assert rows[5].name == protected.url
    assert "secret" not in json.dumps(snapshot.as_json())
    assert snapshot.total()["serving"] == 2
    text = drawn(snapshot)
    assert "2 of 6 servers serve" in text
    assert "… and 1 more problems" in text


@pytest.mark.parametrize(
    "status", [np.array(1.0), [1], {}, {**SOUND, "steps": "many"}, {**SOUND, "uptime": float("nan")}], ids=stable_id
)
def test_a_status_that_makes_no_sense_hides_no_other_server(status: Any) -> None:
    with (
        serve_gym("CartPole-v1") as server,
        Confused(status) as confused,
        Top(Fixed((confused.url, server.url)), "two") as top,
    ):
        snapshot = top.look()
    assert [row.state for row in snapshot.servers] == ["refused", "serving"]
    assert "its server.status cannot be read" in drawn(snapshot)


def test_a_server_that_is_named_twice_is_one_row(tmp_path: Path) -> None:
    with serve_gym("CartPole-v1") as server:
        (tmp_path / "urls.txt").write_text(f"{server.url}\n{server.url}\n")
        for targets in ([server.url, server.url], [(tmp_path / "urls.txt").as_uri()]):
            with Top(find_directory(targets), "two") as top:
                assert [[row.state for row in top.look().servers] for _ in range(3)] == [["serving"]] * 3
                assert server.connections == 1


def test_who_looks_on_does_not_keep_a_server_from_ending() -> None:
    with serve_gym("CartPole-v1") as server:
        env = make_remote(server.url)
        env.reset(seed=0)
        with Top(Fixed((server.url,)), "test") as top:
            assert [row.state for row in top.look().servers] == ["serving"]
            server.drain(60.0)
            until(lambda: server.draining)
            for _ in range(2):
                (row,) = top.look().servers
                assert (row.state, row.slots_used, row.steps_per_second) == ("draining", 1, 0.0)
            env.close()
            until(lambda: [row.state for row in top.look().servers] == ["unreachable"])


def test_a_new_server_at_the_address_of_one_that_drained_is_seen() -> None:
    with serve_gym("CartPole-v1") as server, ExitStack() as stack:
        env = make_remote(server.url)
        env.reset(seed=0)
        top = stack.enter_context(Top(Fixed((server.url,)), "test"))
        assert [row.state for row in top.look().servers] == ["serving"]
        server.drain(60.0)
        until(lambda: [row.state for row in top.look().servers] == ["draining"])
        env.close()
        until(lambda: [row.state for row in top.look().servers] == ["unreachable"])
        with serve_gym("CartPole-v1", port=server.port):
            assert [row.state for row in top.look().servers] == ["serving"]


def test_full_and_draining_servers_are_told_from_dead_ones() -> None:
    with (
        serve_gym("CartPole-v1") as drains,
        serve_gym("CartPole-v1", limits=Limits(max_connections=1)) as full,
        make_remote(drains.url) as env,
        make_remote(full.url),
    ):
        env.reset(seed=0)
        drains.drain(60.0)
        until(lambda: drains.draining)
        with Top(Fixed((drains.url, full.url, "grpc://127.0.0.1:1")), "test") as top:
            snapshot = top.look()
    assert [row.state for row in snapshot.servers] == ["draining", "full", "unreachable"]
    # It is seen for the first time, and tells all the same who is left.
    assert (snapshot.servers[0].worlds, snapshot.servers[0].slots_used, snapshot.servers[0].uptime > 0) == (1, 1, True)
    assert "1 of 3 servers serve, 1 draining, 1 full, 1 unreachable" in drawn(snapshot)


@pytest.mark.parametrize("transport", ["http2", "grpcio", "websocket"])
def test_an_operator_sees_what_a_full_server_does_and_takes_nobodys_place(transport: str) -> None:
    options: Any = {"web": True} if transport == "websocket" else {"transport": transport}
    limits = Limits(max_connections=1)
    with serve_gym("CartPole-v1", token="secret", limits=limits, **options) as server, ExitStack() as stack:
        credentials = ClientCredentials.of(token="secret")
        url = server.urls[-1] if transport == "websocket" else server.url
        top = stack.enter_context(Top(Fixed((server.url,)), "test", credentials))
        env = make_remote(url, token="secret")
        env.reset(seed=0)
        for steps in (1, 2):
            env.step(0)
            (row,) = top.look().servers
            assert (row.state, row.steps, row.worlds, row.slots_used, row.problem) == ("full", steps, 1, 1, "")
        with pytest.raises(RefusedError, match="max_connections=1") as caught:
            make_remote(url, token="secret")
        assert caught.value.code == Code.RESOURCE_EXHAUSTED
        assert server.status()["connections"] == 1
        env.close()
        until(lambda: server.status()["connections"] == 0)
        make_remote(url, token="secret").close()  # while the operator still looks


def test_few_operators_are_let_in_where_there_is_no_place() -> None:
    with (
        serve_gym("CartPole-v1", limits=Limits(max_connections=1)) as server,
        make_remote(server.url),
        ExitStack() as stack,
    ):
        for _ in range(8):
            stack.enter_context(Inspector(server.url, 20.0)).read_property("server.status")
        with pytest.raises(RefusedError, match="max_connections=1"):
            stack.enter_context(Inspector(server.url, 20.0)).read_property("server.status")


def test_servers_with_tls_behind_a_name_are_verified_by_it(tmp_path: Path) -> None:
    held = make_certificates(tmp_path)
    with serve_gym("CartPole-v1", tls=TLS(certificate=held["server.pem"], key=held["server.key"])) as server:

        def resolve(host: str, port: int, **more: Any) -> Any:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

        credentials = ClientCredentials.of(tls=TLS(ca=held["ca.pem"]))
        for name, state in (("localhost", "serving"), ("another.example", "unreachable")):
            with Top(DnsDirectory(f"grpcs+dns://{name}:{server.port}", resolve), "test", credentials) as top:
                assert [row.state for row in top.look().servers] == [state]


def test_a_line_of_json_for_each_look(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym("CartPole-v1") as server:
        assert main(["top", server.url, "--json", "--count", "2", "--interval", "0.01"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["total"]["serving"] for line in lines] == [1, 1]
    assert lines[1]["servers"][0]["url"] == server.url
    assert lines[1]["total"]["steps_per_second"] == 0.0


def test_a_table_and_the_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with serve_gym("CartPole-v1") as server:
        (tmp_path / "urls.txt").write_text(server.url)
        assert main(["top", f"file://{tmp_path}/urls.txt", "--count", "1"]) == 0
    assert "1 of 1 servers serve" in capsys.readouterr().out
    assert main(["top", server.url, "--count", "1", "--json"]) == 1, "nobody answered"
    (row,) = json.loads(capsys.readouterr().out)["servers"]
    # Nobody knows what a server has that does not answer: 0 would read as one that was started anew.
    counts = ("worlds", "slots_used", "connections", "steps", "episodes", "failures", "uptime")
    assert {name: row[name] for name in counts} == dict.fromkeys(counts)
    assert main(["top", f"file://{tmp_path}/none.txt", "--count", "1"]) == 1


def test_targets_are_urls_or_one_directory() -> None:
    assert find_directory(["a:1", "grpc://b:2"]) == Fixed(("a:1", "grpc://b:2"))
    assert find_directory(["file:///urls.txt"]) == FileDirectory("/urls.txt")
    with pytest.raises(SettingError, match="one directory alone"):
        find_directory(["a:1", "file:///urls.txt"])
    with pytest.raises(AddressError, match="scheme"):
        find_directory(["ftp://a:1"])


def test_a_fleet_on_ray_without_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "bridge.fleet.ray", raising=False)
    with pytest.raises(SettingError, match=r"pip install -e '\.\[ray\]'"):
        find_directory(["ray://cart"])


def test_without_rich_the_table_is_plain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    with serve_gym("CartPole-v1") as server:
        assert main(["top", server.url, "127.0.0.1:1", "--count", "2", "--interval", "0.01"]) == 0
    out, err = capsys.readouterr()
    _, *looks = out.split(f"{server.url} 127.0.0.1:1   ")
    assert len(looks) == 2
    for look in looks:
        lines = look.splitlines()
        assert "1 of 2 servers serve, 1 unreachable" in lines
        (head,) = (line for line in lines if line.startswith("server"))
        assert head.split() == ["server", "state", "worlds", "slots", "steps/s", "steps", "episodes", "failures", "up"]
        assert any(line.startswith(server.url) and " serving " in line for line in lines)
        assert any(line.startswith("127.0.0.1:1: no connection") for line in lines)
    assert err == ""


def test_a_long_fleet_shows_those_that_do_not_serve_first() -> None:
    rows = [ServerRow(f"s-{i}", f"grpc://h:{i}", "serving", 16, 16, 1, 2, 1000, 10.0, 5, 0, 100.0) for i in range(50)]
    rows[37] = ServerRow("s-37", "grpc://h:37", "unreachable", problem="no connection: refused")
    rows[38] = ServerRow("s-38", "grpc://h:38", "draining", 16, 3, 3, 2, 12_345_678, 5.0, 5, 7, 90_061.0)
    text = drawn(Snapshot(0.0, "ray://cart", tuple(rows), history=(10.0, 480.0, 495.0)), rows=10)
    lines = text.splitlines()
    assert "48 of 50 servers serve, 1 unreachable, 1 draining" in text
    assert "12,345,678" in text
    assert "▁" in text
    assert [
        line.split()[0] for line in lines if line.startswith("s-") and "problem" not in line and ": " not in line
    ] == [
        "s-37",
        "s-38",
        *(f"s-{i}" for i in range(7)),
    ]
    assert "… and 41 more that serve" in text
    assert "1d 1h" in text
    assert "3/16" in text
    assert max(map(len, lines)) <= 110


def test_the_table_of_a_local_server_fits_a_terminal_of_80_columns_and_hosts_are_shown_as_they_are() -> None:
    busy = {"worlds": 12, "slots": 64, "slots_used": 12, "steps": 1_234_567, "steps_per_second": 9876.5, "uptime": 4e6}
    local = ServerRow("localhost:50051", "localhost:50051", "serving", **busy)
    assert "…" not in drawn(Snapshot(0.0, "a fleet", (local,), "", ()), width=80)
    known = ServerRow("grpc://[fe80::1]:50051", "grpc://[fe80::1]:50051", "serving", **busy)
    lost = ServerRow("grpc://[fd00::2]:50051", "grpc://[fd00::2]:50051", "unreachable")
    text = drawn(Snapshot(0.0, "a fleet", (known, lost), "", ()))
    assert known.name in text
    assert lost.name in text


@pytest.mark.parametrize("width", [40, 60, 80, 100])
@pytest.mark.parametrize("host", ["127.0.0.1", "trainer.example.org"])
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_no_word(host: str, width: int) -> None:
    busy = {"worlds": 12, "slots_used": 12, "steps": 1_234_567, "steps_per_second": 9876.5, "episodes": 23_456}
    rows = [
        ServerRow(f"grpcs://{host}:5111{i}", f"grpcs://{host}:5111{i}", "serving", **busy, uptime=129.0)
        for i in range(2)
    ]
    rows.append(ServerRow(f"grpcs://{host}:51112", f"grpcs://{host}:51112", "unreachable", problem="no connection"))
    text = drawn(Snapshot(0.0, "a fleet", tuple(rows), "", ()), width=width)
    assert "…" not in text
    joined = text.replace("\n", "")
    assert all(word in joined for word in ("steps/s", "9,876", "unreachable"))
    assert all(len(line) <= width for line in text.splitlines())
    assert width < 60 or all(row.name in text for row in rows)


def test_a_problem_is_shown_whole_and_once_for_all_servers_that_have_it() -> None:
    why = "no connection: certificate verify failed. The certificate is not signed by a CA that is trusted here"
    rows = tuple(
        ServerRow(f"h:{i}", f"h:{i}", "unreachable", problem=why if i else "the disk is full") for i in range(6)
    )
    text = " ".join(drawn(Snapshot(0.0, "a fleet", rows, "", ()), width=60).split())
    assert f"h:1 and 4 others: {why}" in text
    assert "h:0: the disk is full" in text
    assert text.count(why) == 1


def test_a_problem_names_its_server_once_and_a_file_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym("CartPole-v1", token="a-secret") as one, serve_gym("CartPole-v1", token="a-secret") as other:
        assert main(["top", one.url, other.url, "--count", "1"]) == 1
        text = capsys.readouterr().out
        assert "a token is required, and none was sent; pass --token … or --token-file …" in text
        assert f"{one.url}, {other.url}: answered UNAUTHENTICATED: " in text
    assert text.rstrip().endswith("or set the environment variable BRIDGE_TOKEN"), "no line is cut"


@pytest.mark.slow
def test_the_status_of_several_processes_is_their_sum() -> None:
    with serve_gym("CartPole-v1", processes=2) as server:
        envs = BlockingReset(make_vec_remote(server.urls))
        envs.reset(seed=0)
        step(envs, 3)
        status = server.status()
        assert (status["worlds"], status["slots"], status["steps"]) == (2, 2, 6)
        assert status["draining"] is False
        envs.close()


def test_frames_of_real_time_and_steps_of_several_agents_are_counted() -> None:
    clock = VirtualClock()
    with (
        serve_gym(lambda: CountingEnv(3), fps=10, realtime=RealTime(clock=clock)) as server,
        make_remote(server.url) as env,
    ):
        env.reset(seed=0)
        for _ in range(8):
            clock.advance(0.1)
        until(lambda: server.status()["steps"] >= 6)
        assert server.status()["episodes"] >= 1
    with serve_parallel(Relay) as server:
        env = make_parallel_remote(server.url)
        env.reset(seed=0)
        steps = 0
        while env.agents:
            env.step({agent: env.action_space(agent).sample() for agent in env.agents})
            steps += 1
        assert (server.status()["steps"], server.status()["episodes"]) == (steps, 1)
        env.close()


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_ctrl_c_waits_for_no_server_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "bridge", "top", f"localhost:{silent.getsockname()[1]}", "--json"]
        with subprocess.Popen([*command, "--timeout", "600"]) as top:
            try:
                connection, _ = silent.accept()  # it asks
                with connection:
                    top.send_signal(signal.SIGINT)
                    assert top.wait(60.0) == 1
            finally:
                top.kill()
