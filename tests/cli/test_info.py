"""`gymnasium-bridge info`, `gymnasium-bridge check` and `gymnasium-bridge bench`: what they tell of a server."""

from __future__ import annotations

import importlib.util
import re
import shlex
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public_pb2

import bridge
from bridge import TLS, Limits, serve_gym, serve_parallel
from bridge.cli import main
from bridge.core.transport.credentials import TOKEN_VARIABLE
from bridge.testing import CountingEnv, make_certificates
from tests.cli.printed import DEADLINE, paste
from tests.parallel_envs import Relay
from tests.public_server import PublicServer
from tests.scripted_server import Refuse, ScriptedServer
from tests.support import until
from tests.web_envs import Paddles


def settled(server: bridge.Server) -> bool:
    """Wait until no connection and no world is left."""
    end = time.monotonic() + DEADLINE
    while (server.connections or server.worlds) and time.monotonic() < end:
        time.sleep(0.01)
    return not (server.connections or server.worlds)


# info


def test_info_tells_all_of_a_server_of_ours_and_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym("CartPole-v1", limits=Limits(max_worlds=7)) as server:
        assert main(["info", server.url, "--all"]) == 0
        assert settled(server)
    out = capsys.readouterr().out
    for text in (
        f"gymnasium-bridge {bridge.__version__} (as this client)",
        "0 now, at most 7",
        "server.limits.max_lanes",
        "CartPole-v1, a single environment",
        "Box([-4.8 -inf -0.41887903 -inf], [4.8 inf 0.41887903 inf], (4,), float32)",
        "Discrete(2)",
        "action 1       action       int64",
        "observation 2  reward       double",
        "the environment ids that CreateWorld may name",
        "world.attributes",
    ):
        assert text in out
    assert re.search(r"^  world\.attributes\.gravity +rw-  \[9\.8\] ", out, re.MULTILINE)


def test_info_says_in_a_few_lines_what_is_served_and_its_last_line_but_one_connects(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve_gym("CartPole-v1", limits=Limits(max_worlds=7)) as server:
        assert main(["info", server.url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 9
        assert "0 now, at most 7" in lines[2]
        code = lines[-2].removeprefix("  connect").strip()
        with paste(code.split("; ")) as env:
            env.reset()


@pytest.mark.parametrize(
    ("served", "said"),
    [
        ({}, "; num_envs=N with blocking=True gets one world of N lanes (up to 256)"),
        ({"limits": Limits(max_worlds=7)}, "; num_envs=N with blocking=True gets one world of N lanes (up to 7)"),
        ({"limits": Limits(max_lanes=5)}, "; num_envs=N with blocking=True gets one world of N lanes (up to 5)"),
        ({"isolation": "process"}, "; num_envs=N with blocking=True gets N worlds"),
        ({"fps": 30}, "; num_envs=N with blocking=True gets N worlds"),
        ({"fps": 30, "limits": Limits(max_worlds=0)}, ""),
    ],
    ids=str,
)
def test_info_says_which_form_of_world_the_usual_call_gets(
    served: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_gym("CartPole-v1", **served) as server:
        for more in ([], ["--all"]):
            assert main(["info", server.url, *more]) == 0
            out = capsys.readouterr().out
            assert f"a single environment{said}\n" in out


def test_info_of_a_match_says_how_a_program_takes_a_seat_and_a_token_stays_unseen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve_parallel(Paddles, fps=30, match=True, token="secret" * 6) as server:
        assert main(["info", server.url, "--token", "secret" * 6]) == 0
    out = capsys.readouterr().out
    assert f'make_remote("{server.url}?world=", timeout=3600, token=…)' in out
    assert "secret" not in out


def test_info_and_bench_look_over_a_unix_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym(["CartPole-v1", "Taxi-v4"], unix_path=str(tmp_path / "s")) as server:
        assert main(["info", server.urls[1]]) == 0
        command = shlex.split(capsys.readouterr().out.partition("name it: gymnasium-bridge ")[2].splitlines()[0])
        assert main(command) == 0
        assert "CartPole-v1, a single environment" in capsys.readouterr().out
        assert main(["bench", command[1], "--seconds", "0.1"]) == 0
        assert "env steps/s" in capsys.readouterr().out


def test_bench_counts_steps_and_no_resets(capsys: pytest.CaptureFixture[str]) -> None:
    for lanes in (1, 3):
        with serve_gym(lambda: CountingEnv(4), num_envs=lanes) as server:
            assert main(["bench", server.url, "--seconds", "0.3"]) == 0
            status = server.status()
        out = capsys.readouterr().out
        calls, resets = (int(found.replace(",", "")) for found in re.findall(r"([\d,]+) (?:in|resets)", out)[::-1])
        assert resets > 0
        # Each episode has four steps; the first and the last one are only in part within the measured time.
        assert abs((calls * lanes - resets) - 4 * resets) <= 8 * lanes, out
        if lanes == 1:  # three steps come before the measuring
            assert abs((calls - resets) - status["steps"]) <= 4, out
        assert settled(server)


def test_every_command_that_connects_shows_a_token_and_a_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    files = make_certificates(tmp_path)
    token = tmp_path / "token"
    token.write_text("correct-horse")
    given = ["--token-file", str(token), "--tls-ca", str(files["ca.pem"])]
    own = ["--tls-certificate", str(files["client.pem"]), "--tls-key", str(files["client.key"])]
    with serve_gym(
        "CartPole-v1",
        token="correct-horse",
        tls=TLS(certificate=files["server.pem"], key=files["server.key"], client_ca=files["ca.pem"]),
    ) as server:
        commands = [["check", server.url, "--only", "D-8"]]
        for url in server.urls:
            commands += [["info", url], ["bench", url, "--seconds", "0.1"]]
            commands += [["play", url, "--frames", "2"]] if importlib.util.find_spec("pygame") else []
        for command in commands:
            assert main([*command, *given, *own]) == 0, command
            refused = 3 if command[0] == "check" else 1
            assert main([*command, *given[2:], *own]) == refused, command
            complaint = capsys.readouterr().err
            assert "a token is required, and none was sent" in complaint
            assert "the stream was ended" not in complaint, "that says nothing to who forgot a token"
            assert main([*command, *given]) == refused, command
            assert "pass --tls-certificate and --tls-key" in capsys.readouterr().err
        until(lambda: server.connections == 0)


def test_check_looks_over_a_unix_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym("CartPole-v1", unix_path=str(tmp_path / "a b")) as server:
        assert main(["check", server.urls[1], "--only", "D-8"]) == 0
    assert main(["check", server.urls[1], "--tls-ca", str(make_certificates(tmp_path)["ca.pem"])]) == 2
    assert "a Unix socket needs none" in capsys.readouterr().err


def test_check_shows_no_token_that_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "grpc://localhost:1", "--token", "two words"]) == 2
    assert "two words" not in capsys.readouterr().err


def test_info_lists_the_property_tree_whole_each_node_before_its_children(
    cartpole: bridge.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", cartpole.url, "--all"]) == 0
    section = capsys.readouterr().out.partition("\nproperties")[2].splitlines()[1:]
    keys = [line.split()[0] for line in section]
    assert len(keys) == len(set(keys))
    assert {"server", "server.limits.max_worlds", "world", "world.observation_space", "world.frame"} <= set(keys)
    for key in keys:
        above = key.rpartition(".")[0]
        assert not above or above in keys[: keys.index(key)]


@pytest.mark.slow
def test_info_of_lanes_tells_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym("Taxi-v4", num_envs=3) as server:
        assert main(["info", server.url, "--all"]) == 0
    out = capsys.readouterr().out
    assert "Taxi-v4, 3 lanes" in out
    assert "observation 1  observation  int64   [3]    min 0, max 499" in out


def test_info_of_a_world_of_several_agents_tells_which_one_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with bridge.serve_parallel(Relay) as server:
        assert main(["info", server.url]) == 0
        assert settled(server)
    out = capsys.readouterr().out
    assert f"these are the spaces of {Relay().possible_agents[0]}" in out
    assert f'make_parallel_remote("{server.url}")' in out


def test_info_shows_what_an_environment_raised_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise RuntimeError("no such map")

    with serve_gym(broken) as server:
        assert main(["info", server.url]) == 1
    err = capsys.readouterr().err
    assert "the environment raised RuntimeError in its construction: no such map\n" in err
    assert err.count("\n") == 1


OBEYED = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"
"""Control characters that clear a terminal, name its window, colour it, and turn the direction of a line."""


class Plain(ScriptedServer):
    def answer(self, kind: str, request: Any) -> Any:
        if kind == "extension":
            raise Refuse(12, "no such thing here")
        return super().answer(kind, request)


def test_info_prints_nothing_of_a_server_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {1: public_pb2.TensorSpec(name=f"action{OBEYED}", dtype=public_pb2.INT8)}
    with Plain(public_pb2.ActionObservationSpecs(actions=kinds, observations=kinds)) as server:
        assert main(["info", server.url, "--all"]) == 0
    out = capsys.readouterr().out
    assert "[2J" in out
    assert all(line.isprintable() for line in out.splitlines())

    def broken() -> None:
        raise RuntimeError(f"no such map {OBEYED}")

    with serve_gym(broken) as server:
        assert main(["info", server.url]) == 1
    err = capsys.readouterr().err
    assert "no such map" in err
    assert all(line.isprintable() for line in err.splitlines())


def test_info_of_a_zoo_lists_it_and_looks_at_the_one_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym(["CartPole-v1", "Taxi-v4"]) as server:
        assert main(["info", server.url]) == 0
        out = capsys.readouterr().out
        assert "serves        CartPole-v1, Taxi-v4, in lock-step" in out
        assert f"name it: gymnasium-bridge info {server.url}/CartPole-v1" in out
        assert main(["info", f"{server.url}/Taxi-v4"]) == 0
        assert "Discrete(500)" in capsys.readouterr().out
        assert settled(server)


def test_info_joins_a_world_that_the_url_names(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_gym("CartPole-v1") as server:
        assert main(["info", f"{server.url}?num_envs=2"]) == 0
        assert "CartPole-v1, 2 lanes" in capsys.readouterr().out
        assert main(["info", f"{server.url}?world="]) == 0
        assert server.worlds == [""], "the default world stays, as it was not made for this look"


def test_info_of_a_foreign_server_says_so_and_makes_spaces_of_its_specs(capsys: pytest.CaptureFixture[str]) -> None:
    """D-24."""
    with PublicServer() as server:
        assert main(["info", server.url, "--all"]) == 0
        assert not [name for name in server.worlds if name], "a world is left behind"
    out = capsys.readouterr().out
    assert "not a Gymnasium Bridge server" in out
    assert "'pose': Dict('angles': Box([-1. -2. -3.], [1. 2. 3.], (3,), float32))" in out
    assert "'move': Discrete(4, dtype=int32)" in out
    assert "action 7 " in out
    assert "volume       rw-  0.5" in out
    assert "server.key   ---           server.key." in out, "what cannot be read is not asked for"


@pytest.mark.parametrize("options", [{}, {"create": False}])
def test_info_of_a_foreign_server_without_properties_gives_its_specs(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """D-4, D-18: a server may have neither properties nor CreateWorld."""
    with PublicServer(kind="bare", properties=False, **options) as server:
        assert main(["info", server.url, "--all"]) == 0
    out = capsys.readouterr().out
    assert "action 3       move" in out
    assert "none: the server does not serve the property extension" in out


@pytest.mark.parametrize("command", ["info", "bench"])
def test_nobody_there_is_one_line_and_exit_code_1(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody else gets it meanwhile
        assert main([command, f"grpc://127.0.0.1:{unused.getsockname()[1]}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "Is the server running there" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "url", "said"),
    [
        ("info", "http://127.0.0.1:80", "use grpc://127.0.0.1:80"),
        ("info", "perlert://127.0.0.1:80", "the scheme 'perlert' is none of"),
        ("bench", "http://127.0.0.1:80", "use grpc://127.0.0.1:80"),
        ("bench", "perlert://127.0.0.1:80/c:0", "is for servers of dm_env_rpc, got perlert:// URLs"),
    ],
)
def test_an_unreadable_url_is_one_line_and_exit_code_2(
    command: str, url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, url]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_environment_is_exit_code_1_and_names_those_there_are(
    cartpole: bridge.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", f"{cartpole.url}/Nope-v0"]) == 1
    assert "the environment 'Nope-v0' is not served here; this server has CartPole-v1" in capsys.readouterr().err


def test_info_gives_up_on_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        assert main(["info", f"127.0.0.1:{mute.getsockname()[1]}", "--timeout", "0.3"]) == 1
    assert "no answer within 0.3 s: are host and port right" in capsys.readouterr().err


# bench


@pytest.mark.parametrize(("options", "count"), [([], 1), (["--num-envs", "3"], 3)])
def test_bench_counts_environment_steps_and_leaves_nothing_behind(
    options: list[str], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_gym("CartPole-v1", token="secret") as server:
        # Who shows the figures to others does not show the token.
        assert main(["bench", f"{server.url}?token=secret", *options, "--seconds", "0.2"]) == 0
        assert settled(server)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{server.url}: {count} environment")
    rates = [float(line.partition("steps/s")[2].split()[0].replace(",", "")) for line in lines[1:3]]
    assert rates[1] > 1
    assert rates[0] == pytest.approx(rates[1] * count, rel=0.1)
    assert all(name in lines[3] for name in ("median", "90 %", "99 %", "most"))


def test_bench_says_which_form_of_world_it_got(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "urls.txt"
    with serve_gym("CartPole-v1") as one, serve_gym("CartPole-v1", num_envs=2, thread_safe=True) as lanes:
        listed.write_text(f"{one.url}\n")
        for arguments, said in (
            ([one.url, "--num-envs", "4"], "4 environments, lanes of one world"),
            ([listed.as_uri(), "--num-envs", "4"], "4 environments, 4 worlds"),
            ([lanes.url, "--num-envs", "4"], "4 environments, 2 worlds of 2 lanes"),
            ([lanes.url, one.url], "3 environments, 2 worlds of 1, 2 lanes"),
        ):
            assert main(["bench", *arguments, "--seconds", "0.1"]) == 0
            assert capsys.readouterr().out.splitlines()[0].endswith(f": {said}")


def test_bench_takes_a_directory_and_refuses_what_no_environment_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "urls.txt"
    with serve_gym("CartPole-v1") as server:
        directory.write_text(f"{server.url}\n")
        assert main(["bench", directory.as_uri(), "--seconds", "0.1"]) == 0
        assert capsys.readouterr().out.startswith(f"{directory.as_uri()}: 1 environment")
        assert main(["bench", server.url, "--seed", "-1"]) == 2
        told = "argument --seed: expected a seed, an integer from 0 on, got '-1'\n"
        assert capsys.readouterr().err.endswith(told)
        assert main(["bench", "listen://127.0.0.1:0", server.url]) == 2
