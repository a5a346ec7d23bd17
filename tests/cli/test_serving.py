"""`gymnasium-bridge serve`: a program that serves until a signal, what it prints, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium
import psutil
import pytest

import bridge
from bridge import make_remote
from bridge.cli import main
from bridge.core.transport.credentials import write_secret
from bridge.errors import ConnectError, EnvironmentFailedError
from bridge.recording.reader import read_folder
from bridge.testing import ServerProcess, make_certificates
from tests.cli.printed import DEADLINE, paste
from tests.peers import PublicClient
from tests.places import ROOT
from tests.preloaded import Program, run
from tests.support import sampled, until


class Serving:
    """A `gymnasium-bridge serve`, or another command that serves, as a user starts it, with what it prints."""

    def __init__(self, *arguments: str, cwd: Path | None = None, command: str = "serve") -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `__exit__` closes it
        self.process = Program("-m", "bridge", command, *arguments, cwd=cwd, stderr=self._errors.fileno())

    def printed(self) -> list[str]:
        """Return the lines up to the one that says how to stop."""
        lines = []
        # Line by line, as far as it needs; it ends with the process, which `__exit__` ends.
        for line in iter(self.process.stdout.readline, ""):
            lines.append(line.rstrip("\n"))
            if lines[-1].startswith("Ctrl-C"):
                return lines
        raise AssertionError(f"it ended after {lines}: {self.said()}")

    def said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def wait(self) -> tuple[int, str, str]:
        """Wait for its end; return the exit code, and what it has printed since."""
        code = self.process.wait(DEADLINE)
        return code, self.process.stdout.read(), self.said()

    def end(self, number: int) -> tuple[int, str, str]:
        self.process.send_signal(number)
        return self.wait()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()
        self._errors.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_server_and_it_exits_with_0(number: int) -> None:
    with Serving("CartPole-v1") as serving:
        lines = serving.printed()
        assert lines[0].startswith("CartPole-v1 is served at grpc://127.0.0.1:")
        code, out, err = serving.end(number)
    assert (code, err) == (0, "")
    assert "stopped" in out


@pytest.mark.parametrize("words", [(), ("--processes", "2")], ids=["one process", "two processes"])
def test_a_server_that_drains_says_for_whom_it_waits_and_when_they_have_left(words: tuple[str, ...]) -> None:
    with Serving("CartPole-v1", "--drain-timeout", "60", *words) as serving:
        url = re.search(r"grpc://\S+", serving.printed()[0])[0]
        env = make_remote(url)
        env.reset(seed=0)
        serving.process.send_signal(signal.SIGTERM)
        line = r"INFO draining: 1 client is left, until \d\d:\d\d:\d\d at the latest \(60 s\)\n"
        until(lambda: re.search(line, serving.said()), DEADLINE)
        env.close()
        code, out, err = serving.wait()
    assert (code, out) == (0, "stopped: connections and environments are closed\n")
    assert re.fullmatch(
        rf".* {line}.* INFO drained: (the last client has left|all servers have ended) after .* s\n", err
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["policy", "web", "replay", "serve --perlert"])
def test_every_command_that_serves_until_a_signal_then_exits_with_0_as_its_help_says(
    command: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "policy": ["policy", "operator:neg", "--port", "0"],
        "web": ["web", "grpc://127.0.0.1:1", "--port", "0"],
        "serve --perlert": ["serve", "CartPole-v1", "--perlert", "0"],
    }
    if command == "replay":
        with bridge.serve_gym("CartPole-v1", record=tmp_path) as server:
            env = bridge.make_remote(server.url)
            env.reset(seed=1)
            env.step(0)
            env.close()
        words["replay"] = ["replay", str(tmp_path / read_folder(tmp_path).episodes()[0].id), "--serve"]
    with Serving(*words[command][1:], command=words[command][0]) as serving:
        serving.printed()
        code, _, err = serving.end(number)
    assert (code, err) == (0, "")
    assert main([words[command][0], "--help"]) == 0
    codes = capsys.readouterr().out.partition("exit codes:")[2]
    assert re.search(r"130 +interrupted by Ctrl-C; .*\b0$", codes, re.MULTILINE), codes


def test_a_close_environment_is_suggested_by_an_id_that_can_be_served(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this process may have registered environments with names like these.
    for name in [
        name for name, spec in gymnasium.registry.items() if not str(spec.entry_point).startswith("gymnasium.")
    ]:
        monkeypatch.delitem(gymnasium.registry, name)
    for written, meant in [
        ("CartPole", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("CartPole-v9", "CartPole-v1"),
        ("CartPoll-v1", "CartPole-v1"),
        ("mountaincar", "MountainCar-v0"),
        ("phys2d/Cartpole", "phys2d/CartPole-v1"),
        ("gymnasium:Taxi", "gymnasium:Taxi-v4"),
        # What is written before the colon registers the id: without it the suggestion might not be found.
        ("gymnasium:Taxy-v4", "gymnasium:Taxi-v4"),
        ("gymnasium.envs:phys2d/Cartpole", "gymnasium.envs:phys2d/CartPole-v1"),
    ]:
        assert main(["serve", written, "--port", "0"]) == 2
        assert f"id you mean {meant}?" in capsys.readouterr().err
    assert main(["serve", "CartPole", "Taxi-v4"]) == 2
    assert "no registered environment matches 'CartPole'; did you mean CartPole-v1?" in capsys.readouterr().err
    assert main(["serve", "gymnasium:Taxi-v9", "Taxi-v4"]) == 2
    assert "matches 'gymnasium:Taxi-v9'; did you mean gymnasium:Taxi-v4?" in capsys.readouterr().err
    assert main(["serve", "gymnasium:"]) == 2
    assert "expected MODULE:NAME, got 'gymnasium:' without a name; MODULE:NAME names" in capsys.readouterr().err
    assert main(["serve", "NothingLikeThis-v0"]) == 2
    assert "you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [("replay", "--verify"), ("export", "--mp4=films")])
def test_an_environment_is_named_for_recordings_as_it_is_for_a_server(
    command: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], "--help"]) == 0
    recorded = " ".join(capsys.readouterr().out.split())
    assert main(["serve", "--help"]) == 0
    served = " ".join(capsys.readouterr().out.split())
    said = "a Gymnasium id; MODULE:ENV_ID imports the module first; MODULE:NAME is a function or class"
    assert said in served
    assert said in recorded
    assert "--env ENV_ID" in recorded
    assert main([command[0], str(tmp_path), command[1], "--env", "CartPole*"]) == 2
    assert "expected --env with what makes one environment, got 'CartPole*'" in capsys.readouterr().err


def test_a_signal_that_comes_while_the_wait_holds_its_lock_stops_the_server() -> None:
    code = """
import signal, threading, bridge
wait = threading.Condition.wait

def interrupted(self, timeout=None):
    if threading.current_thread() is threading.main_thread():
        threading.Condition.wait = wait
        signal.raise_signal(signal.SIGTERM)
    return wait(self, timeout)

with bridge.serve_gym("CartPole-v1") as server:
    threading.Condition.wait = interrupted
    server.wait(0.0)
print("stopped")
"""
    done = run("-c", code, timeout=DEADLINE)
    assert done.stdout == "stopped\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_waits_stops_it_too(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            said.append(text)
            if " served at " in text:
                signal.raise_signal(number)
            return len(text)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # where the mistake would end the tests
    handler = signal.getsignal(number)
    try:
        monkeypatch.setattr(sys, "stdout", Output())
        monkeypatch.setattr(bridge.Server, "wait", lambda server: pytest.fail("the signal was lost"))
        assert main(["serve", "CartPole-v1"]) == 0
        (port,) = re.findall(r" served at grpc://127\.0\.0\.1:(\d+)", "".join(said))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), DEADLINE)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_printed_lines_connect_when_they_are_pasted() -> None:
    with Serving("CartPole-v1") as serving:
        env = paste(serving.printed()[2:4])
        observation, _ = env.reset(seed=0)
        assert observation.shape == (4,)
        code, _, err = serving.end(signal.SIGTERM)  # while the client is connected
        env.close()
    assert code == 0
    begins, ends = err.splitlines()
    assert " INFO draining: 1 client is left, until " in begins
    assert " WARNING drain timed out: 1 client is still there, and cut off after " in ends


def test_the_printed_lines_connect_to_lanes_when_they_are_pasted() -> None:
    with Serving("CartPole-v1", "--num-envs", "3") as serving:
        envs = paste(serving.printed()[2:4])
        assert envs.num_envs == 3
        envs.close()


def test_the_printed_lines_connect_to_one_of_a_zoo_when_they_are_pasted() -> None:
    with Serving("Taxi-v4", "MountainCar*") as serving:
        lines = serving.printed()
        assert lines[0].startswith("Taxi-v4, MountainCar* are served at ")
        env = paste(lines[2:4])
        assert env.action_space.n == 6
        env.close()
        other = bridge.make_remote(lines[0].split()[-1], env_id="MountainCar-v0")
        assert other.action_space.n == 3
        other.close()


def test_a_module_of_the_current_folder_is_imported_for_its_environment(tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Pole(CartPoleEnv):\n"
        "    def __init__(self, length=0.5, name='', **rest):\n"
        "        super().__init__(**rest)\n"
        "        self.half, self.title = length, name\n"
        "gymnasium.register('Mine/Pole-v0', Pole)\n"
    )
    pairs = ["--env-kwargs", "length=0.75", "name=tall one"]
    with Serving("my_envs:Mine/Pole-v0", *pairs, cwd=tmp_path) as serving:
        env = paste(serving.printed()[2:4])
        assert env.get_attr("half") == 0.75
        assert env.get_attr("title") == "tall one"
        env.close()


MINE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from tests.parallel_envs import Relay

def make_pole(length=0.5, **rest):
    env = CartPoleEnv(**rest)
    env.half = length
    return env

def make_relay(horizon: int = 8) -> Relay:
    return Relay(horizon)
"""


@pytest.mark.parametrize("options", [[], ["--fps", "100"]], ids=["lock-step", "real time"])
def test_a_function_of_a_module_is_called_for_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "mine.py").write_text(MINE)
    with Serving("mine:make_pole", *options, "--env-kwargs", "length=0.75", cwd=tmp_path) as serving:
        env = paste(serving.printed()[2:4])
        assert env.get_attr("half") == 0.75
        assert env.fps == (100.0 if options else None)
        assert env.reset()[0].shape == (4,)
        env.close()


@pytest.mark.parametrize("options", [[], ["--fps", "100"]], ids=["lock-step", "real time"])
def test_a_function_that_makes_several_agents_is_served_to_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "mine.py").write_text(MINE)
    with Serving("mine:make_relay", *options, "--env-kwargs", "horizon=5", cwd=tmp_path) as serving:
        env = paste(serving.printed()[2:4])
        observations, _ = env.reset()
        assert list(observations) == ["ann", "bob", "cyd"]
        assert env.call("horizon") == 5
        env.close()


def test_a_pettingzoo_module_is_served_in_real_time_to_public_clients_and_ours() -> None:
    """U-1, D-22: another package's environment, in a process of its own; one agent a client, and a spectator."""
    with Serving("mpe2:simple_tag_v3", "--fps", "100", "--env-kwargs", "max_cycles=1000") as serving:
        lines = serving.printed()
        assert lines[0].startswith("mpe2:simple_tag_v3 is served at grpc://127.0.0.1:")
        url = lines[0].split()[-1]
        assert lines[3].strip() == f'env = make_parallel_remote("{url}")'
        ours = bridge.make_remote(f"{url}?world=", agent="agent_0", wait="next_frame")
        public = PublicClient(None, url.removeprefix("grpc://")).join(agent="adversary_1")
        watcher = bridge.make_remote(f"{url}?world=", agent="agent_0", role="spectator")
        seen, _ = ours.reset(seed=3)
        assert seen.shape == (14,)
        assert public.step("observation")[1]["observation"].shape == (16,)
        assert watcher.reset()[0].shape == (14,)
        frames = 0
        while frames < 20:
            _, _, terminated, truncated, info = ours.step(1)
            assert not terminated
            assert not truncated
            frames += info["frames"]
            assert public.step("frames", action=2)[0] == 1
        assert watcher.step(0)[4]["frames"] >= 20
        public.close()
        ours.close()
        watcher.close()
        code, _, _ = serving.end(signal.SIGTERM)
        assert code == 0


def test_a_server_ends_with_its_standard_input_when_told_to() -> None:
    server = ServerProcess("CartPole-v1")
    try:
        assert server.url.startswith("grpc://127.0.0.1:")
        server.release()
        assert server.wait(DEADLINE) == 0
    finally:
        assert server.stop() == 0


@pytest.mark.skipif(os.name != "posix", reason="kills without a warning")
def test_servers_do_not_outlive_a_program_that_is_killed() -> None:
    code = (
        "from bridge.testing import ServerProcess\nserver = ServerProcess('CartPole-v1')\n"
        "print(server.pid, server.url, flush=True)\ninput()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        server = psutil.Process(int(program.stdout.readline().split()[0]))
        program.kill()
        server.wait(DEADLINE)
    assert not server.is_running()


def test_a_server_process_that_fails_says_what_it_said_each_time() -> None:
    with ServerProcess("Nope-v1") as server:
        for _ in range(2):
            with pytest.raises(
                ConnectError, match="before it printed a URL; it said: gymnasium-bridge: cannot serve 'Nope"
            ):
                _ = server.url


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Nope-v1"], "cannot serve 'Nope-v1'"),
        (["CartPole-v1", "Nope*"], "no registered environment matches 'Nope*'"),
        (["no_such_module:Env-v0"], "cannot import the module of 'no_such_module:Env-v0'"),
        (
            ["no_such_module:Env-v0"],
            "If no_such_module.py is yours, run this command in its folder; if it is of a package",
        ),
        (["tests.parallel_envs:Nothing"], "the module tests.parallel_envs has no 'Nothing'; MODULE:NAME names"),
        (["tests.parallel_envs:string"], "'tests.parallel_envs:string' is a module without parallel_env or env"),
        (["tests.parallel_envs:NAMES"], "'tests.parallel_envs:NAMES' is of type tuple, which makes no environment"),
        (["CartPole-v1", "tests.parallel_envs:Relay"], "or 'tests.parallel_envs:Relay' alone: a zoo is of ids"),
        (["tests.parallel_envs:Relay", "--num-envs", "2"], "--num-envs cannot be given for tests.parallel_envs:Relay"),
        (["CartPole-v1", "--missing-agent", "end"], "--missing-agent cannot be given for CartPole-v1, a Gymnasium"),
        (["tests.parallel_envs:Relay", "--fps", "5", "--agent-timeout", "3"], "--agent-timeout are of lock-step"),
        (["CartPole-v1", "--env-kwargs", "gravity"], "expected --env-kwargs to be KEY=VALUE, e.g. gravity=9.8"),
        (["CartPole-v1", "--max-action-age", "1"], "--max-action-age is for real-time worlds: give --fps too"),
        (["CartPole-v1", "--host", ""], "expected host to be an address, such as 0.0.0.0 for every one, got ''"),
        (["CartPole-v1", "--unix-path", ""], "expected --unix-path to be a path, or None, got ''"),
        (["CartPole-v1", "--metrics-host", "127.0.0.1"], "is the address of --metrics-port: give that too"),
        (["CartPole-v1", "--port", "65535", "--processes", "2"], "--port 65535 leaves no port for process 2"),
        (["CartPole-v1", "--perlert", "70000"], "expected a port from 0 to 65535, got 70000"),
        (["CartPole-v1", "--dial-name", "one"], "--dial-ca and --dial-name are for a server that dials: give --dial"),
        (["CartPole-v1", "--array", "numpy", "--device", "cpu"], "--device 'cpu' is for --array 'torch' or 'jax'"),
        (["CartPole-v1", "--max-lanes", "0"], "expected --max-lanes to be a positive integer, got 0"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gymnasium-bridge: ")
    assert said in err
    assert err.count("\n") == 1


def test_waiting_for_no_server_can_be_said_as_it_is_by_default(cartpole: bridge.Server) -> None:
    for nothing in ("0", "0.0"):
        assert main(["info", cartpole.url, "--wait-for-server", nothing]) == 0


@pytest.mark.parametrize("port", ["x", "70000", "-1", "80.5", ""])
@pytest.mark.parametrize("command", [["serve", "CartPole-v1"], ["replay", "a/b", "--serve"], ["policy", "a:b"]])
def test_what_is_no_port_is_said_of_the_option(
    command: list[str], port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"--port={port}"]) == 2
    assert capsys.readouterr().err.endswith(f"argument --port: expected a port from 0 to 65535, got {port!r}\n")


def test_what_is_no_port_of_metrics_is_said_of_that_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "CartPole-v1", "--metrics-port", "70000"]) == 2
    assert "argument --metrics-port: expected a port from 0 to 65535, got '70000'" in capsys.readouterr().err


def test_a_host_that_is_another_machine_s_is_named_and_no_other_port_is_proposed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "CartPole-v1", "--host", "192.0.2.1"]) == 1
    said = capsys.readouterr().err
    assert "cannot listen on --host '192.0.2.1': " in said
    assert "Expected an address of this machine" in said
    assert "port" not in said


def test_a_port_in_use_is_one_line_and_exit_code_1(cartpole: bridge.Server, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "CartPole-v1", "--port", str(cartpole.port)]) == 1
    assert f"cannot listen on --port {cartpole.port} of 127.0.0.1: Address already in use" in capfd.readouterr().err


ZOO_OF_ONE = """
import os, gymnasium
from gymnasium import spaces
from bridge.testing import CountingEnv

class Robot(CountingEnv):
    def __init__(self, length=5, dependency="", space=None, broken=False, render_mode=None):
        if dependency:
            remedy = f'pip install "gymnasium[{dependency}]"'
            raise gymnasium.error.DependencyNotInstalled(f"{dependency} is not installed, run `{remedy}`")
        super().__init__(length)
        if space is not None:
            self.observation_space = spaces.Dict(arm=spaces.Dict(joint=spaces.Space((1,), space)))
        self.broken = broken
        print(f"made {length}", flush=True)

    def step(self, action):
        if self.broken:
            raise RuntimeError("the arm is stuck")
        return super().step(action)

    def close(self):
        print("closed", flush=True)

gymnasium.register("Robot-v0", Robot, disable_env_checker=True, order_enforce=False)

class Team:
    def __init__(self, **kwargs):
        self.robot = Robot(**kwargs)
        self.possible_agents, self.agents = ["robot"], []

    def observation_space(self, agent):
        return self.robot.observation_space

    def action_space(self, agent):
        return self.robot.action_space

    def reset(self, seed=None, options=None):
        self.agents = ["robot"]
        return tuple({"robot": item} for item in self.robot.reset(seed=seed, options=options))

    def step(self, actions):
        return tuple({"robot": item} for item in self.robot.step(actions["robot"]))

    def close(self):
        self.robot.close()

def parallel_env(**kwargs):  # the name that a PettingZoo module has for it
    return Team(**kwargs)
"""


@pytest.fixture
def robots(tmp_path: Path) -> Path:
    """A folder with a module that registers an environment which says when it is made and closed."""
    (tmp_path / "robots.py").write_text(ZOO_OF_ONE)
    return tmp_path


EVERY_ISOLATION = pytest.mark.parametrize("isolation", [(), ("--isolation", "process")], ids=["here", "isolated"])


@pytest.mark.slow
@EVERY_ISOLATION
@pytest.mark.parametrize("target", ["Robot-v0", "parallel_env"])
def test_the_first_world_uses_the_environment_that_was_made_at_the_start(
    robots: Path, isolation: tuple[str, ...], target: str
) -> None:
    with Serving(f"robots:{target}", *isolation, cwd=robots) as serving:
        lines = serving.printed()
        assert lines[0] == "made 5"
        with contextlib.closing(paste(lines[3:5])) as one:
            one.reset()
            with contextlib.closing(paste(lines[3:5])) as other:  # a second world has an environment of its own
                other.reset()
        code, out, err = serving.end(signal.SIGINT)
    assert (code, err) == (0, "")
    assert out.splitlines()[:3] == ["made 5", "closed", "closed"]


def test_an_environment_that_was_made_at_the_start_gives_way_to_one_with_other_arguments(robots: Path) -> None:
    with Serving("robots:Robot-v0", cwd=robots) as serving:
        lines = serving.printed()
        with make_remote(lines[1].split()[-1], env_kwargs={"length": 7}) as env:
            env.reset()
        out = serving.end(signal.SIGTERM)[1]
    assert out.splitlines()[:3] == ["closed", "made 7", "closed"]


def test_an_environment_that_no_world_takes_is_closed(robots: Path) -> None:
    with Serving("robots:Robot-v0", cwd=robots) as serving:
        serving.printed()
        out = serving.end(signal.SIGTERM)[1]
    assert out.splitlines()[0] == "closed"


MISSING = (("dependency=box2d",), 1, '{}: .*box2d is not installed, run `pip install "gymnasium\\[box2d\\]"`')


UNKNOWN = (
    ("foo=1",),
    2,
    r"{} could not be made with --env-kwargs {{'foo': 1}}: .*unexpected keyword argument 'foo'",
)


UNKNOWN_INSIDE = (("foo=1",), 1, "{}: .*unexpected keyword argument 'foo'")


FOREIGN = (("space=float32",), 2, r"{}: .*expected a space of Gymnasium's own kinds at \['arm'\]\['joint'\], got")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "options", "problem"),
    sampled(
        [
            *[("Robot-v0", (), problem) for problem in (MISSING, UNKNOWN, FOREIGN)],
            *[("Robot-v0", ("--isolation", "process"), problem) for problem in (MISSING, UNKNOWN, FOREIGN)],
            *[("Robot-v0", ("--processes", "2"), problem) for problem in (MISSING, UNKNOWN, FOREIGN)],
            # It takes any keyword and hands it on, so what raises is the environment.
            *[("parallel_env", (), problem) for problem in (MISSING, UNKNOWN_INSIDE, FOREIGN)],
            ("parallel_env", ("--isolation", "process"), FOREIGN),
            (
                "Robot-v0",
                ("--perlert", "0"),
                ((MISSING[0], 1, MISSING[2].format("cannot make the environment of robot:0"))),
            ),
        ],
        4,
    ),
)
def test_what_keeps_an_environment_from_being_made_is_reported_at_the_start(
    robots: Path, target: str, options: tuple[str, ...], problem: tuple[tuple[str, ...], int, str]
) -> None:
    arguments, code, message = problem
    with Serving(f"robots:{target}", "--env-kwargs", *arguments, *options, cwd=robots) as serving:
        ended, out, err = serving.wait()
    assert ended == code
    assert "served at" not in out
    said = [line for line in err.splitlines() if not line.startswith(("made", "closed"))]  # the environment's
    *before, last = said
    assert re.match(f"gymnasium-bridge: {message.format(target)}", last), said
    assert "Traceback" not in last
    # Above it, where the environment itself raised: where that was. A wrong setting or a missing package takes a line.
    assert before[:1] == (["Traceback (most recent call last):"] if code == 1 and arguments != MISSING[0] else []), said


@pytest.mark.parametrize(("option", "tracebacks", "connections"), [((), 1, 0), (("-q",), 0, 0), (("-v",), 1, 1)])
def test_the_console_shows_what_an_environment_raises_once(
    robots: Path, option: tuple[str, ...], tracebacks: int, connections: int
) -> None:
    with Serving("robots:Robot-v0", "--env-kwargs", "broken=True", *option, cwd=robots) as serving:
        with paste(serving.printed()[3:5]) as env:
            for _ in range(3):
                env.reset()
                with pytest.raises(EnvironmentFailedError, match="the arm is stuck"):
                    env.step(0)
        code, _, err = serving.end(signal.SIGTERM)
    assert code == 0
    assert err.count("Traceback ") == tracebacks
    assert err.count("RuntimeError: the arm is stuck") == tracebacks
    assert err.count(" closed\n") == connections


def test_the_banner_has_what_a_client_needs(tmp_path: Path) -> None:
    paths = make_certificates(tmp_path)
    token = tmp_path / "token"
    write_secret(token, b"t" * 32)
    given = (
        "--token-file",
        str(token),
        "--tls-certificate",
        str(paths["server.pem"]),
        "--tls-key",
        str(paths["server.key"]),
    )
    with Serving("CartPole-v1", *given, "--tls-client-ca", str(paths["ca.pem"])) as serving:
        lines = serving.printed()
        env = paste(lines[2:4])
        env.reset()
        env.close()
    assert f'token_file="{token}"' in lines[3]
    assert "'" not in lines[3]


def test_the_banner_of_a_match_tells_people_and_programs_how_to_take_a_seat() -> None:
    with Serving("tests.web_envs:parallel_env", "--fps", "30", "--match", "--web", "--countdown", "0.1") as serving:
        lines = serving.printed()
        url = lines[0].partition(" served at ")[2].split()[0]
        assert "make_parallel_remote" not in "".join(lines)
        assert f"In a terminal: gymnasium-bridge play '{url}?world='" in lines
        assert any(line.startswith("In a browser: http://") for line in lines)
        with paste([line.partition("  #")[0] for line in lines[2:4]]) as env:
            env.reset()
        assert serving.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--port", "{taken}"], 1),
        (["--host", "192.0.2.1"], 1),  # an address that this machine does not have, or not yet
        (["--metrics-port", "{taken}"], 1),
        (["--processes", "2", "--port", "{taken}"], 1),
        (["--transport", "grpcio", "--port", "{taken}"], 1),
        (["--unix-path", "/nowhere/at/all"], 2),
        (["--host", "a..b"], 2),
        (["--port", "70000"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_exit_code_tells_an_address_that_may_be_free_later_from_a_wrong_setting(
    options: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [option.format(taken=port) for option in options]
        assert main(["serve", "CartPole-v1", "--insecure", *given]) == code
    assert "cannot listen on" in capsys.readouterr().err or code == 2


ARM = """
import gymnasium
import numpy as np


class Arm(gymnasium.Env):
    \"\"\"The observation is the action that was applied; a list would fail here.\"\"\"

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(2, 9, np.float32), {}

    def step(self, action):
        return action.copy(), 0.0, False, False, {}
"""


@pytest.mark.parametrize("given", ["[0.5, -1]", "0.5,-1"])
def test_the_default_action_is_given_on_the_command_line(tmp_path: Path, given: str) -> None:
    (tmp_path / "arm.py").write_text(ARM, "utf-8")
    with Serving("arm:Arm", "--port", "0", "--fps", "50", "--default-action", given, cwd=tmp_path) as serving:
        url = serving.printed()[0].split()[-1]
        with (
            make_remote(f"{url}?world=") as player,
            make_remote(f"{url}?world=", role="spectator", wait="next_frame") as watcher,
        ):
            player.reset(seed=0)  # and nothing else: nobody acts
            watcher.reset()
            observation, *_ = watcher.step(watcher.action_space.sample())
            assert observation.tolist() == [0.5, -1.0]


def test_a_default_action_that_fits_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "mpe2:simple_tag_v3", "--port", "0", "--fps", "9", "--default-action", "0"]) == 2
    assert "for several give --agents" in capsys.readouterr().err
    assert main(["serve", "CartPole-v1", "--port", "0", "--default-action", "0"]) == 2
    assert "--default-action is for real-time worlds: give --fps too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--default-action", "7"], "expected --default-action to be an element of Discrete(2), got 7"),
        (["--default-action", "left"], "expected --default-action to be an element of Discrete(2), got 'left'"),
        (["--default-action", "2", "--num-envs", "2"], "expected --default-action to be an element of Discrete(2)"),
        (["--default-action", "7", "--isolation", "process"], "expected --default-action to be an element of Disc"),
        (["--num-envs", "2", "--vectorization-mode", "async"], "expected --vectorization-mode 'sync', got Async"),
    ],
)
def test_what_no_clock_can_step_is_refused_before_the_server_says_that_it_serves(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "CartPole-v1", "--port", "0", "--fps", "9", *options]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert not printed.out
