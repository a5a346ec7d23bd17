"""What all commands share: help, exit codes and errors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import bridge
from bridge.cli import main
from bridge.errors import EnvironmentFailedError, SettingError
from tests.cli.printed import DEADLINE
from tests.inside import add_command
from tests.places import ROOT
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
    for asked in ("help", "version"):
        assert main([asked]) == 2
        assert f"there is no command {asked!r}; did you mean --{asked}?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["info"], ["check"]])
def test_who_leaves_out_what_is_required_is_told_where_examples_are(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    complaint = capsys.readouterr().err
    assert "the following arguments are required: " in complaint
    assert complaint.endswith(f"; `gymnasium-bridge {command[0]} --help` has examples\n")


def test_the_short_help_says_what_port_0_is(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "web"):
        assert main([command, "--help"]) == 0
        assert "the port to listen on, 0 for any free port (default: " in " ".join(capsys.readouterr().out.split())


def uneven(lines: Sequence[str], gap: int, mark: str) -> bool:
    """True if comments behind commands begin in different columns, but for those behind a longer command."""
    found = [match for line in lines if (match := re.match(rf"\s*\S.*?( {{{gap},}}){mark}", line))]
    common = {match.end(1) for match in found if len(match[1]) > gap}
    behind = {match.end(1) for match in found if len(match[1]) == gap}
    return len(common) > 1 or any(longer < column for longer in behind for column in common)


def test_the_comments_of_examples_begin_in_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    commands = re.findall(r"^    ([a-z]+)$|^    ([a-z]+)  ", capsys.readouterr().out, re.M)
    assert len(commands) > 15
    for command in map("".join, commands):
        assert main([command, "--help"]) == 0
        examples = capsys.readouterr().out.partition("examples:\n")[2].partition("\n\n")[0].split("\n")
        assert not uneven(examples, 3, r"\S"), examples


def test_the_comments_of_commands_in_the_docs_begin_in_one_column() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    blocks = [
        block.split("\n")
        for page in pages
        for block in re.findall(r"^```(?:sh|shell|bash|console)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    ]
    assert len(blocks) > 20
    assert [block for block in blocks if uneven(block, 2, "# ")] == []
