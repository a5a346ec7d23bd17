"""The standalone server as a program: its command line, signals and its end."""

import ast
import contextlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from bridge import make_remote
from bridge.errors import EnvironmentFailedError, RemoteError
from bridge.testing import CountingEnv
from tests.preloaded import run as run_program
from tests.standalone.served import ENVS, OLD
from tests.standalone_server import DEADLINE, FILE, Output, standalone


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["NoSuchEnv-v0"], "no environment 'NoSuchEnv-v0'"),
        (["no_such_module:Env-v0"], "no_such_module:Env-v0 cannot be served: No module named 'no_such_module'"),
        (["bridge.no_such:Env-v0"], "bridge.no_such:Env-v0 cannot be served: No module named 'bridge.no_such'"),
        (["CartPole-v1", "--num-envs", "0"], "expected num_envs to be an integer from 1"),
        (["CartPole-v1", "--port", "99999"], "the port of 127.0.0.1:99999 is taken, or is no port of 1 to 65535"),
        (["CartPole-v1", "--port", "-1"], "the port of 127.0.0.1:-1 is taken, or is no port of 1 to 65535"),
        (["CartPole-v1", "--tls-key", __file__], "both --tls-certificate and --tls-key"),
        (
            ["CartPole-v1", "--tls-key", "k.pem"],
            "argument --tls-key: expected a file that you may read: No such file or directory",
        ),
        (["CartPole-v1", "--env-kwargs", "gravity"], "KEY=VALUE"),
        (["CartPole-v1", "--token-file", os.devnull], "expected a token in"),
        (
            ["CartPole-v1", "--token-file", "f8c69f0d" * 8],
            "argument --token-file: expected a file that you may read: No such file or directory",
        ),
        ([f"{OLD}:WalkOverGraphs"], "observation is a Graph, which this server does not serve"),
    ],
)
def test_the_command_line_says_what_is_wrong(arguments, reason):
    done = run_program(FILE, *arguments, cwd=FILE.parents[2], bare=True)
    assert done.returncode != 0
    assert reason in done.stderr, done.stderr
    assert "Traceback" not in done.stderr or "Graph" in done.stderr
    assert "f8c69f0d" not in done.stderr


@pytest.mark.parametrize("python", ["2.7", "3.5", "3.6"])
def test_an_older_python_is_told_what_is_needed(python):
    """Those before 3.6 print the line that they cannot read: it is the one that says so."""
    found = [
        *Path.home().glob(f".pyenv/versions/{python}.*/bin/python"),
        *filter(None, [shutil.which(f"python{python}")]),
    ]
    for interpreter in found[:1]:
        done = subprocess.run(
            [interpreter, str(FILE), "CartPole-v1"], capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert done.returncode == 1
        assert "serve_env.py needs Python 3.7 or newer" in done.stderr
        assert "Traceback" not in done.stderr
    # Without the interpreter: nothing before the line is newer than Python 2.7.
    before = FILE.read_text("ascii").partition("    raise SystemExit(f")[0]
    assert not re.search(r"\bf\"|: \w+ = |:=|\basync\b|\bnonlocal\b|print\(", before)
    ast.parse(f"{before}    pass\n", feature_version=(3, 4))


@pytest.mark.parametrize(
    ("there", "missing"), [([], "grpc"), (["grpc"], "numpy"), (["grpc", "numpy"], "google")], ids=str
)
def test_a_python_without_the_three_packages_is_told_what_installs_them(tmp_path, there, missing):
    for name in there:
        (tmp_path / f"{name}.py").write_text("")
    # With `-S` no installed package is found.
    command = [sys.executable, "-S", str(FILE), "CartPole-v1"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=environment, check=False)
    install = f"{sys.executable} -m pip install grpcio protobuf numpy"
    assert done.stderr == f"No module named '{missing}': {install}\n"
    assert done.returncode == 1


def test_a_package_that_an_environment_lacks_is_named():
    """Also where a library raises an error of its own, as Gymnasium does without pygame."""
    said = "The server's Python has no module 'no_such_game': install the package that has it there."
    with standalone(f"{ENVS}:Needy") as server:
        env = make_remote(server.url)
        with pytest.raises(EnvironmentFailedError, match="DependencyNotInstalled in reset: the game is not") as caught:
            env.reset()
        assert str(caught.value).rstrip().endswith(said)
        env.close()
    command = [sys.executable, str(FILE), f"{ENVS}:Needy", "--env-kwargs", "where=construction"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, cwd=FILE.parents[2], check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(said)


def test_a_signal_while_a_result_is_handed_over_ends_the_server_in_order():
    lines = [
        "import os, signal",
        "from concurrent.futures import Future",
        "import serve_env",
        "from tests.old_style_env import Walk",
        "set_result = Future.set_result",
        "def interrupted(future, value):",
        "    set_result(future, value)",
        "    Future.set_result = set_result",
        "    os.kill(os.getpid(), signal.SIGINT)",
        "Future.set_result = interrupted",
        "serve_env.serve(Walk, port=0)",
    ]
    path = os.pathsep.join([str(FILE.parent), str(FILE.parents[2])])
    command = [sys.executable, "-c", "\n".join(lines)]
    environment = {**os.environ, "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as server:
        try:
            address = server.stdout.readline().strip()
            with pytest.raises(RemoteError):
                make_remote(f"grpc://{address}", timeout=5.0).close()
            _, problems = server.communicate(timeout=DEADLINE)
        finally:
            server.kill()
    assert (server.returncode, problems) == (0, "")


def test_a_connection_to_a_server_that_stops_is_told_so():
    file = runpy.run_path(str(FILE))
    server = file["StandaloneServer"](file["maker_of"](CountingEnv, False))
    server.main.end()

    class Context:
        def invocation_metadata(self):
            return ()

        def abort(self, code, text):
            raise ConnectionAbortedError(code, text)

    with pytest.raises(ConnectionAbortedError) as caught:
        list(server.process(iter(()), Context()))
    assert caught.value.args == (grpc.StatusCode.UNAVAILABLE, "this server is stopping")


def test_a_second_signal_ends_a_server_whose_environment_does_not_close():
    path = os.pathsep.join([str(FILE.parent), str(FILE.parents[2])])
    code = f"import serve_env; from {ENVS} import NeverClosed; serve_env.serve(NeverClosed, port=0)"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, "PYTHONPATH": path}) as server:
        output = Output(server)
        try:
            lines = iter(output)
            with make_remote(f"grpc://{next(lines).strip()}") as remote:  # a connection, whose thread waits
                remote.reset()
                server.send_signal(signal.SIGINT)
                assert next(lines).strip() == "closing"
                server.send_signal(signal.SIGINT)
                assert server.wait(DEADLINE) != 0
        finally:
            server.kill()
        output.close()


def test_the_docs_and_the_server_connect_to_several_lanes_as_a_vector():
    page = (FILE.parents[2] / "docs" / "environments.md").read_text()
    options = re.search(r"serve_env\.py my_package:MyEnv-v0 --port 50051(.*?)#", page)[1].split()
    block = next(
        text for text in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "simulator:" in text
    )
    with standalone(f"{OLD}:Walk", *options) as server:
        found = {}
        exec(block.replace("grpc://simulator:50051", server.url), found)
        with contextlib.closing(found["envs"]) as envs:
            assert envs.reset(seed=0)[0].shape[0] == envs.num_envs == 4
        said = next(line for line in server.output if line.startswith("Connect: "))
        assert said == f'Connect: bridge.make_vec_remote("{server.url}"). Ctrl-C stops.\n'


def test_an_engine_of_ones_own_is_served():
    """`serve` is what the file is an example of."""
    page = (FILE.parents[2] / "docs" / "environments.md").read_text()
    block = next(
        text for text in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "serve(" in text
    )
    code = "from tests.old_style_env import Walk as MyEngine\n" + block.replace("50051", "0")
    path = os.pathsep.join([str(FILE.parent), str(FILE.parents[2])])
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as server:
        output = Output(server)
        try:
            with make_remote(f"grpc://{next(iter(output)).strip()}") as remote:
                remote.reset(seed=1)
                remote.step(1)
            server.send_signal(signal.SIGINT)
            assert server.wait(DEADLINE) == 0
        finally:
            server.kill()
        output.close()
