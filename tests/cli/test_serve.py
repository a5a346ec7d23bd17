"""The options of `gymnasium-bridge serve`."""

import dataclasses
import inspect
import itertools
import os
import re
from pathlib import Path

import pytest

from bridge import Limits, serve_gym, serve_parallel
from bridge.cli import main
from bridge.cli.serve import client_credentials, read_pairs, serve_options
from bridge.errors import SettingError
from tests.preloaded import run
from tests.support import chosen


def test_every_keyword_that_a_command_line_can_say_is_an_option_with_its_help() -> None:
    options = dict(serve_options())
    parameters = {**inspect.signature(serve_parallel).parameters, **inspect.signature(serve_gym).parameters}
    keywords = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
        and name not in ("start", "states")  # of a server that a program starts later; in a group
        and any(kind in str(parameter.annotation) for kind in ("int", "float", "str", "bool", "Literal"))
    ]
    keywords += [field.name for field in dataclasses.fields(Limits)]
    keywords += ["record_observations", "record_frames", "record_infos", "record_unattended", "record_max_bytes"]
    keywords += [
        "default_action",
        "max_action_age",
        "catch_up",
        "reset_timeout",
        "rest_when_empty",
        "tls_certificate",
        "tls_key",
        "tls_client_ca",
        "watch_token_file",
        "insecure",
        "shared_control",
        "web_hosts",
        "play_fps",
        "action_names",
        "quality",
    ]
    keywords += ["max_states", "max_state_bytes", "max_replay_steps", "state_timeout", "state_abandoned_timeout"]
    assert {"num_envs", "vectorization_mode", "env_kwargs", "host", "port", "max_connections"} <= set(keywords)
    # Lists of names are an option that is given for each of them.
    singular = {"protocols": "protocol", "observers": "observer", "messages": "message"}
    assert sorted(options) == sorted(f"--{singular.get(name, name).replace('_', '-')}" for name in keywords)
    for flag, arguments in options.items():
        assert len(arguments["help"].split()) > 2, f"the docstrings say nothing of {flag}"


def test_the_help_has_sections_and_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    for command, option, least in (("serve", "--help-all", 10), ("web", "--help", 4)):
        assert main([command, option]) == 0
        text = capsys.readouterr().out
        options, _, _ = text.partition("\nexamples:")
        assert len(re.findall(r"^\S.*:$", options, re.MULTILINE)) >= least, text
        assert not re.search(r"`|\b(None|True|False)\b", options), options


def test_the_help_is_a_screen_of_usual_options_and_help_all_has_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = {}
    for option in ("--help", "-h", "--help-all"):
        assert main(["serve", option]) == 0
        shown[option] = capsys.readouterr().out
    assert shown["--help"] == shown["-h"]
    assert len(shown["--help"].splitlines()) <= 50
    every = serve_options_of(shown["--help-all"])
    assert {flag for flag, _ in serve_options()} | {"--perlert", "--exit-on-eof", "--debug"} <= every
    usual = serve_options_of(shown["--help"])
    assert {"--num-envs", "--env-kwargs", "--host", "--port", "--token-file", "--fps", "--web", "--record"} <= usual
    assert usual <= every
    for text in shown.values():
        assert "MODULE:NAME is a function or class that makes an environment" in " ".join(text.split())
        assert "examples:\n  gymnasium-bridge serve CartPole-v1" in text
        assert text.count("exit codes:") == 1


def serve_options_of(text: str) -> set[str]:
    """The flags that a help lists."""
    return set(re.findall(r"^  (?:-\w(?: \w+)?, )?(--[a-z0-9-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("option", ["--vectorization-mode", "--isolation", "--missing-agent", "--transport"])
def test_another_word_than_an_option_has_is_told_with_those_it_has(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "CartPole-v1", option, "magic"]) == 2
    assert f"argument {option}: invalid choice: 'magic' (choose from " in capsys.readouterr().err


def test_an_option_that_may_be_none_takes_the_word() -> None:
    read = dict(serve_options())["--idle-timeout"]["type"]
    assert (read("none"), read("2.5")) == (None, 2.5)
    with pytest.raises(ValueError, match="soon"):
        read("soon")


def test_environment_arguments_are_python_literals_or_text() -> None:
    read = read_pairs(["a=1", "b=0.5", "c=False", "d=None", "e=[1, 2]", "f=8x8", "g=a=b", "h='1'", "i="])
    assert read == {
        "a": 1, "b": 0.5, "c": False, "d": None, "e": [1, 2], "f": "8x8", "g": "a=b", "h": "1", "i": ""
    }  # fmt: skip
    with pytest.raises(SettingError, match="got '=1'"):
        read_pairs(["=1"])


def test_credentials_in_the_printed_lines_hide_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_TOKEN", "t" * 32)
    assert client_credentials({}) == {"token": "…"}
    monkeypatch.delenv("BRIDGE_TOKEN")
    assert client_credentials({}) == {}
    assert client_credentials({"token": "secret" * 6}) == {"token": "…"}


MINE = """
import gymnasium

class Arm(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.model = self.load()

    def load(self):
        try:
            return {}["model"]
        except KeyError as error:
            raise RuntimeError("no\\x1b[2Jmodel") from error

class Eyeless(Arm):
    load = dict
    observation_space = property(lambda self: look())

def look():
    raise OSError("no camera")

gymnasium.register("Arm-v0", entry_point=Arm)
"""
BROKEN = """
def table():
    return 1 / 0

TABLE = table()
"""


WHERE = {
    "Arm": (["__init__", "load"], "RuntimeError"),
    "Arm-v0": (["__init__", "load"], "RuntimeError"),
    "Eyeless": (["look"], "OSError"),
}
"""The functions of an environment of `MINE` that fail, and what they raise."""
HOW = ["", "--isolation process", "--num-envs 2", "--fps 10", "--perlert 0"]


@pytest.mark.parametrize(
    ("name", "more"), chosen(itertools.product(WHERE, HOW), lambda name, more: name == "Arm" or not more)
)
def test_the_console_says_where_an_environment_failed_while_it_was_made(name: str, more: str, tmp_path: Path) -> None:
    functions, error = WHERE[name]
    (tmp_path / "mine.py").write_text(MINE)
    # As an interpreter of its own, where modules of the current folder are found.
    done = run(
        "-m", "bridge", "serve", f"mine:{name}", *more.split(), cwd=tmp_path, env={**os.environ, "PYTHONPATH": "."}
    )
    assert done.returncode == 1
    *traceback, last = done.stderr.splitlines()
    assert last.startswith("gymnasium-bridge: ")
    assert f"the environment raised {error} in its construction: no" in last
    places = [re.search(r"mine\.py\", line \d+, in (\w+)$", line) for line in traceback]
    assert {match[1] for match in places if match} >= set(functions)
    assert "\x1b" not in done.stderr
    assert "Fix the environment" not in done.stderr


@pytest.mark.parametrize("command", [["serve", "broken_1:Arm"], ["policy", "broken_1:act"]])
def test_the_console_says_where_a_module_failed(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_1.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(command) == 1
    *traceback, last = capsys.readouterr().err.splitlines()
    said = f"cannot import the module of {command[1]!r}: it raised ZeroDivisionError: division by zero"
    assert last == f"gymnasium-bridge: {said}"
    assert [line.split(", ")[1:] for line in traceback if "File" in line] == [
        ["line 5", "in <module>"],
        ["line 3", "in table"],
    ]


def test_the_console_says_which_line_imports_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outer_1.py").write_text("import json\nimport inner_1\n")
    (tmp_path / "inner_1.py").write_text("\n\ndef load():\n    from json import no_such_name\n\n\nload()\n")
    (tmp_path / "needy_1.py").write_text("\nimport no_such_package_1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, place in (("outer_1", ("inner_1.py", 4)), ("needy_1", ("needy_1.py", 2))):
        assert main(["serve", f"{name}:Arm"]) == 2
        where = f"(imported in {tmp_path / place[0]}, line {place[1]})"
        assert where in capsys.readouterr().err
    assert main(["serve", "no_such_package_1:Arm"]) == 2
    assert "imported in" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("query", "text"), [("timeout=soon", "the timeout 'soon' is"), ("tls_ca=x", "a CA's certificate is for wss://")]
)
def test_what_is_wrong_in_a_policys_url_is_no_option(query: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "grpc://127.0.0.1:1", "--policy", f"ws://127.0.0.1:1?{query}", "--episodes", "1"]) == 2
    told = capsys.readouterr().err
    assert text in told
    assert "--t" not in told


@pytest.mark.parametrize(
    ("flag", "default"), [("--port PORT", "(default: 0)"), ("--host HOST", "(default: 127.0.0.1)")]
)
def test_the_short_help_tells_defaults(flag: str, default: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    (told,) = re.findall(rf"{flag} (.*?) --", shown)
    assert told.endswith(default)


def test_bytes_and_seconds_take_units_and_an_error_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    options = dict(serve_options())
    for flag, arguments in options.items():
        read = arguments.get("type")
        if arguments.get("metavar") == "BYTES":
            given = [read(text) for text in ("600", "64MiB", "64m", "600MB", "1.5 GiB", "2_000")]
            assert given == [600, 2**26, 2**26, 600_000_000, 3 * 2**29, 2000], flag
            wrong, unit = ("64 miles", "1.0001k", "MB", "0.5"), "expected bytes, such as "
        elif arguments.get("metavar") == "SECONDS":
            given = [read(text) for text in ("60", "60s", "1.5", "500ms", "10m", "2H", "1e3")]
            assert given == [60.0, 60.0, 1.5, 0.5, 600.0, 7200.0, 1000.0], flag
            wrong, unit = ("60MB", "soon", "1m 5s"), "expected seconds, such as "
        else:
            assert not flag.endswith(("-bytes", "-timeout")), flag
            continue
        for text in wrong:
            assert main(["serve", "CartPole-v1", flag, text]) == 2
            assert f"argument {flag}: {unit}" in capsys.readouterr().err
    assert {"--max-world-bytes", "--drain-timeout", "--idle-timeout", "--max-queued-bytes"} <= set(options)
    # What counts something else has no unit.
    assert main(["serve", "CartPole-v1", "--fps", "30s"]) == 2


def test_a_limit_in_which_no_process_starts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("600", "600k"):
        assert main(["serve", "CartPole-v1", "--isolation", "process", "--max-world-bytes", given]) == 2
        assert "expected --max-world-bytes to be bytes, 33554432 (32 MiB) or more" in capsys.readouterr().err
