"""What all commands share: help, exit codes and errors."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import bridge
from bridge.cli import main
from bridge.errors import EnvironmentFailedError, SettingError
from tests.cli.printed import DEADLINE
from tests.inside import add_command
from tests.preloaded import run


@pytest.mark.parametrize("command", ["serve", "info", "bench", "check", "lobby", "demo"])
def test_the_help_of_each_command_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"examples:\n  gymnasium-bridge {command}" in out
    assert out.count("exit codes:") == 1


def test_no_command_is_a_usage_error_that_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "publish environments until Ctrl-C" in capsys.readouterr().err


def test_an_unknown_option_is_a_usage_error_of_its_command_that_names_a_close_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "CartPole-v1", "--prot", "5", "--zzz"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: gymnasium-bridge serve ")
    assert err.endswith("gymnasium-bridge serve: error: unrecognized arguments: --prot 5 --zzz; did you mean --port?\n")
    assert main(["bench", "grpc://localhost:1", "--zzz"]) == 2
    assert capsys.readouterr().err.endswith("gymnasium-bridge bench: error: unrecognized arguments: --zzz\n")


@pytest.mark.parametrize("words", [["--tokn", "hidden"], ["--tokn=hidden"], ["--tls-kye", "hidden", "--zzz"]])
def test_the_value_of_a_misspelled_secret_is_not_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "CartPole-v1", *words]) == 2
    err = capsys.readouterr().err
    assert words[0].partition("=")[0] in err
    assert "did you mean --t" in err
    assert "hidden" not in err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gymnasium-bridge {bridge.__version__}\n"


def test_debug_shows_the_traceback_that_is_hidden_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "nonsense"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["info", "nonsense", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_what_a_command_raises_becomes_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = EnvironmentFailedError("grpc://a:1", "the environment raised ValueError: no\nTraceback …\n", 13)
    for error, code, said in [
        (KeyboardInterrupt(), 130, "gymnasium-bridge: interrupted\n"),
        (SettingError("expected this,\n  got that"), 2, "gymnasium-bridge: expected this, got that\n"),
        (failed, 1, "gymnasium-bridge: grpc://a:1 answered INTERNAL: the environment raised ValueError: no\n"),
        (
            ZeroDivisionError("by zero"),
            1,
            "gymnasium-bridge: unexpected ZeroDivisionError: by zero (--debug shows where)\n",
        ),
    ]:
        raised: BaseException = error

        def fail(arguments: Any, raised: BaseException = raised) -> int:
            raise raised

        def register(commands: Any, run: Any = fail) -> None:
            commands.add_parser("fail").set_defaults(run=run)

        monkeypatch.setitem(sys.modules, "fail_command", SimpleNamespace(register=register))
        add_command(monkeypatch, "fail", "fail_command")
        assert main(["fail"]) == code
        assert capsys.readouterr().err == said


def test_a_reader_that_has_enough_is_no_error(cartpole: bridge.Server) -> None:
    command = [sys.executable, "-m", "bridge", "info", cartpole.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(DEADLINE) == 0


def test_a_sub_command_imports_what_it_needs_alone() -> None:
    code = (
        "import sys; from bridge.cli import main; main(['cert', '--help']); main(['--version']); "
        "print(sorted({'numpy', 'gymnasium', 'bridge.core.server', 'bridge.core.client'} & set(sys.modules)))"
    )
    done = run("-c", code, bare=True)
    assert done.returncode == 0, done.stderr
    assert "bridge.core.server" not in done.stdout.splitlines()[-1]


def test_a_command_that_is_misspelt_names_the_one_that_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inf", "localhost:1"]) == 2
    assert "there is no command 'inf'; did you mean info?" in capsys.readouterr().err
    assert main(["x"]) == 2
    assert "there is no command 'x'; `gymnasium-bridge --help` lists the commands" in capsys.readouterr().err
