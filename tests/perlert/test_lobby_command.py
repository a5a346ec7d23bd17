"""`gymnasium-bridge lobby`: people in a terminal, and through a pipe."""

import io
import os
import re
import signal
import socket
import threading
import time

import pytest
from gymnasium import spaces

from bridge.cli import main
from bridge.cli.lobby import _user, clean, key_actions, key_legend, run_lobby
from bridge.perlert import LobbyConfig, PerlertEnv, serve_perlert
from bridge.perlert.protocol.packet import MAX_CLIENT_MESSAGE
from tests.perlert.environments import Counter
from tests.preloaded import Program, run


def serve(*options):
    """Start `gymnasium-bridge serve --perlert`; return the process and its URL."""
    server = Program("-W", "error", "-m", "bridge", "serve", "CartPole-v1", "--perlert", "0", *options)
    return server, server.stdout.readline().split()[-1]


def end(server):
    if server.poll() is None:
        server.kill()
        server.wait()
    server.stdout.close()


def lobby(url, *options, typed=""):
    return run("-W", "error", "-m", "bridge", "lobby", url, *options, typed=typed)


def test_served_until_a_signal_and_played_in_the_terminal_through_a_pipe():
    server, url = serve("--fps", "60", "--spectators", "1")
    try:
        assert url.startswith("perlert://127.0.0.1:")
        played = lobby(url, "--tag", "joe", "--once", typed="slots\nregister agent0\nready\n")
        assert played.returncode == 0, played.stderr
        assert played.stderr == ""
        assert "you are agent0 (joe)" in played.stdout
        assert " * agent0       cartpole     taken  ready      joe" in played.stdout
        assert "server: Simulation will start..." in played.stdout
        assert "keys  ←/a: 0  →/d: 1  0-1: actions 0 to 1  q: quit" in played.stdout
        assert "the run is over: return " in played.stdout
        assert "spectator0" in played.stdout
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        end(server)


def test_serve_takes_a_key_bots_and_spectators(tmp_path):
    # P-26
    pytest.importorskip("cryptography")
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    server, url = serve("--perlert-key-file", str(key), "--bots", "--fps", "60")
    try:
        listed = lobby(url, "--key-file", str(key), typed="quit\n")
        assert "agent0       cartpole     open   ready      cpu" in listed.stdout, listed.stderr
        assert f"--key-file {key}" in server.stdout.readline()
    finally:
        end(server)


def test_options_of_perlert_without_it_are_a_usage_error(capsys, tmp_path):
    assert main(["serve", "CartPole-v1", "--spectators", "1"]) == 2
    assert "--spectators is for --perlert PORT" in capsys.readouterr().err
    missing = str(tmp_path / "missing")
    assert main(["serve", "CartPole-v1", "--perlert", "0", "--perlert-key-file", missing]) == 2
    assert f"cannot read the key file '{missing}'" in capsys.readouterr().err
    # Somebody who gives the key in place of its file must not find it in a log.
    assert main(["serve", "CartPole-v1", "--perlert", "0", "--perlert-key-file", "0123456789abcdef"]) == 2
    shown = capsys.readouterr().err
    assert "cannot read the key file …: No such file" in shown
    assert "0123456789abcdef" not in shown


def test_a_slot_or_lobby_that_is_not_there_and_a_slot_that_is_taken_are_told():
    patient = LobbyConfig(
        expiry=600.0
    )  # the holder is silent while terminals start, which takes long on a busy machine
    with (
        serve_perlert("CartPole-v1", fps=60, lobby_config=patient) as server,
        PerlertEnv(server.url, tag="holder") as env,
    ):
        assert env.agent == "agent0"
        wrong = lobby(server.url, "--agent", "zzz")
        assert wrong.returncode == 1
        assert "there is no slot 'zzz'; the slots are agent0" in wrong.stdout
        taken = lobby(server.url, typed="register agent0\nquit\n")
        assert "agent0 is taken by holder; choose an open slot" in taken.stdout
        output = io.StringIO()
        keys = Keys()
        url = server.url.replace("cartpole:0", "nope:0")
        assert run_lobby(url, source=keys.file, target=output, answer_within=2.0) == 1
        keys.close()
        assert "the server says: There is no nope:0 here; there is cartpole:0" in output.getvalue()
        assert output.getvalue().count("server: There is no nope:0 here") == 1


def test_two_terminals_of_one_user_are_called_differently():
    assert _user() != _user()


class Keys:
    """A pipe to type into."""

    def __init__(self):
        self.read_end, self.write_end = os.pipe()
        self.file = os.fdopen(self.read_end)

    def type(self, text):
        os.write(self.write_end, text.encode())

    def close(self):
        os.close(self.write_end)
        self.file.close()


def wait_for(output, text, seconds=20.0):
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while text not in output.getvalue():
        assert time.monotonic() < deadline, f"{text!r} did not come in:\n{output.getvalue()}"
        pause.wait(0.01)


def test_people_play_by_lines_and_a_spectator_sees_the_run():
    # P-29: people and programs in one simulation.
    with serve_perlert(
        lambda: Counter(300), name="count", fps=60, max_rate=60, spectators=1, slots={"agent0": "human"}
    ) as server:
        keys, watch = Keys(), Keys()
        output, watched = io.StringIO(), io.StringIO()
        codes = []
        people = threading.Thread(
            target=lambda: codes.append(run_lobby(server.url, tag="ann", source=keys.file, target=output))
        )
        spectator = threading.Thread(
            target=lambda: codes.append(
                run_lobby(server.url, tag="bob", spectate=True, once=True, source=watch.file, target=watched)
            )
        )
        spectator.start()
        wait_for(watched, "* spectator0   spectator    taken  ready      bob")
        people.start()
        wait_for(output, "agent0       human        open")
        keys.type("nonsense\nregister agent9\nregister agent0 anna\nready\n")
        wait_for(output, "the run starts on port")
        keys.type("0.25,-0.5\naction 9,9\n")
        wait_for(output, "not an action: expected a value of Box")
        # It would fill the datagram, in which the profile writes before it.
        keys.type(f"0.25{'0' * (MAX_CLIENT_MESSAGE - 30)},0\n")
        wait_for(output, "not an action: expected a message of at most")
        wait_for(output, "the run is over: return 150")
        assert "there is no slot 'agent9'; the slots are agent0, spectator0" in output.getvalue()
        assert "unknown command 'nonsense'; `help` lists them" in output.getvalue()
        assert "commands:" not in output.getvalue()
        assert "you are agent0 (anna)" in output.getvalue()
        assert "taken  ready      anna" in output.getvalue()
        keys.type("quit\n")
        people.join(10.0)
        spectator.join(10.0)
        keys.close()
        watch.close()
        assert codes == [0, 0]
        assert not people.is_alive()
        assert "last:0.25,-0.5" in watched.getvalue()
        assert "the run is over: return 150" in watched.getvalue()


def test_a_peers_text_cannot_command_the_terminal():
    assert clean("a\x1b[2Jb\r\n\u202ec") == "a\N{REPLACEMENT CHARACTER}[2Jb" + "\N{REPLACEMENT CHARACTER}" * 3 + "c"


def test_keys_mean_actions():
    two = key_actions(spaces.Discrete(2))
    assert (two["\x1b[D"], two["\x1b[C"], two["0"], two["1"], two["a"], two["d"]) == ("0", "1", "0", "1", "0", "1")
    four = key_actions(spaces.Discrete(4))
    assert [four[key] for key in ("\x1b[D", "\x1b[B", "\x1b[C", "\x1b[A")] == ["0", "1", "2", "3"]
    assert key_actions(spaces.Discrete(3, start=-1))["\x1b[C"] == "1"
    assert key_actions(spaces.Box(-1, 1)) == {}
    assert key_legend(spaces.Discrete(5)) == "keys  ←/a: 0  ↓/s: 1  →/d: 2  ↑/w: 3  0-4: actions 0 to 4  q: quit"
    assert key_legend(spaces.Box(-1, 1)) == "type an action and Enter"


def test_in_a_terminal_single_keys_play_and_the_terminal_is_put_back():
    pty = pytest.importorskip("pty")
    import termios

    with serve_perlert("CartPole-v1", fps=60) as server:
        controller, terminal = pty.openpty()
        before = termios.tcgetattr(terminal)
        output = io.StringIO()
        codes = []
        with os.fdopen(terminal, "r") as source:
            player = threading.Thread(
                target=lambda: codes.append(
                    run_lobby(server.url, agent="agent0", once=True, source=source, target=output)
                )
            )
            player.start()
            wait_for(output, "taken")
            os.write(controller, b"ready\n")
            wait_for(output, "keys  ←/a: 0")
            for _ in range(5):
                os.write(controller, b"\x1b[C\x1b[D1")
            wait_for(output, "the run is over")
            player.join(10.0)
            assert not player.is_alive()
            assert termios.tcgetattr(terminal) == before
        os.close(controller)
        assert codes == [0]


def test_a_lobby_that_does_not_answer_is_told_and_the_exit_status_says_so(monkeypatch):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"perlert://127.0.0.1:{silent.getsockname()[1]}/cartpole:0"
        keys, output = Keys(), io.StringIO()
        code = run_lobby(url, source=keys.file, target=output, answer_within=0.3)
        keys.close()
    assert code == 1
    assert "no PERLERT lobby answered" in output.getvalue()


def test_the_lobby_for_terminals_is_refused_where_a_terminal_cannot_be_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        code = main(["lobby", "perlert://127.0.0.1:1"])
    assert code == 2
    assert re.search(r"needs Linux or macOS.*bridge\.perlert\.PerlertEnv", capsys.readouterr().err)
