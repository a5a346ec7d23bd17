"""The options of `bridge serve`."""

import dataclasses
import inspect
import re

import pytest

from bridge import Limits, serve_gym, serve_parallel
from bridge.cli import main
from bridge.cli.serve import client_credentials, read_pairs, serve_options
from bridge.errors import SettingError


def test_every_keyword_that_a_command_line_can_say_is_an_option_with_its_help() -> None:
    options = dict(serve_options())
    parameters = {**inspect.signature(serve_parallel).parameters, **inspect.signature(serve_gym).parameters}
    keywords = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
        and name != "start"  # of a server that a program starts later
        and any(kind in str(parameter.annotation) for kind in ("int", "float", "str", "bool", "Literal"))
    ]
    keywords += [field.name for field in dataclasses.fields(Limits)]
    keywords += ["record_observations", "record_frames", "record_infos", "record_unattended", "record_max_bytes"]
    keywords += [
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
    ]
    assert {"num_envs", "vectorization_mode", "env_kwargs", "host", "port", "max_connections"} <= set(keywords)
    assert sorted(options) == sorted(f"--{name.replace('_', '-')}" for name in keywords)
    for flag, arguments in options.items():
        assert len(arguments["help"].split()) > 2, f"the docstrings say nothing of {flag}"


def test_the_help_has_sections_and_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    for command, least in (("serve", 10), ("web", 4)):
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        options, _, _ = text.partition("\nexamples:")
        assert len(re.findall(r"^\S.*:$", options, re.MULTILINE)) >= least, text
        assert not re.search(r"`|\b(None|True|False)\b", options), options


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
