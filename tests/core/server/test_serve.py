"""`bridge.serve`: a program that does nothing but serve."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bridge
from tests.project.processes import waits_for_sigterm
from tests.support import until

DEADLINE = 60.0


@pytest.mark.parametrize(("number", "page"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)])
def test_a_program_serves_until_a_signal_and_ends_in_order(number: signal.Signals, page: bool) -> None:
    program = f"import bridge; bridge.serve('CartPole-v1', num_envs=2, web={page}); print('the end')"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            first = server.stdout.readline()
            url = first.split()[2]
            envs = bridge.make_vec_remote(url, blocking=True)
            envs.reset(seed=1)
            assert envs.step(envs.action_space.sample())[1].shape == (2,)
            envs.close()
            server.send_signal(number)
            rest, problems = server.communicate(timeout=DEADLINE)
        finally:
            server.kill()
    assert (server.returncode, rest, problems) == (0, "the end\n", "")
    shown = f" {url.replace('grpc', 'ws', 1)}, with a page at {url.replace('grpc', 'http', 1)}/" if page else ""
    assert first == f"serving at {url}{shown} until Ctrl-C\n"


@pytest.mark.slow
def test_ctrl_c_while_the_first_world_s_process_starts_ends_the_program_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import bridge\n"
        "from bridge.testing import CountingEnv\n"
        "if __name__ == '__main__':\n"
        f"    bridge.serve(CountingEnv, unix_path={str(tmp_path / 's')!r}, isolation='process')\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        try:
            # It listens, handles signals, and makes the environment next: "serving at" comes after that.
            until(lambda: (tmp_path / "s").exists() and waits_for_sigterm(server.pid))
            server.send_signal(signal.SIGINT)
            _, problems = server.communicate(timeout=DEADLINE)
        finally:
            server.kill()
    assert (server.returncode, problems) == (0, b"")


def test_its_keywords_are_those_of_serve_gym_but_for_start() -> None:
    whole = inspect.signature(bridge.serve_gym).parameters
    assert list(inspect.signature(bridge.serve).parameters.items()) == [
        (name, parameter) for name, parameter in whole.items() if name != "start"
    ]


def test_what_cannot_be_served_is_said_at_once() -> None:
    with pytest.raises(bridge.errors.SettingError, match="Nowhere-v0"):
        bridge.serve("Nowhere-v0")


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_host_that_is_no_name_is_said_to_be_none(host: str) -> None:
    with pytest.raises(bridge.errors.SettingError, match=rf"cannot listen on host='{host}': .* address of this"):
        bridge.serve_gym("CartPole-v1", host=host)


def test_a_wrong_grace_leaves_a_server_as_it_was() -> None:
    with bridge.serve_gym("CartPole-v1", start=False) as server:
        with pytest.raises(bridge.errors.SettingError, match="expected grace to be a number"):
            server.run(grace=-1)
        server.start()
        bridge.make_remote(server.url).close()
