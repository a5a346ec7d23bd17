"""Sub-commands of other packages, and of features that an installation lacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import serve_gym
from bridge.cli import main
from tests.places import ROOT
from tests.preloaded import run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEADLINE = 60.0
GREET = """
import sys

def register(commands):
    parser = commands.add_parser("greet", description="Greet.")
    parser.add_argument("--name", default="you")
    parser.set_defaults(run=run, exit_codes={KeyError: 7})

def run(arguments):
    if arguments.name == "nobody":
        raise KeyError("nobody")
    print("hello", arguments.name, "other" in sys.modules)
    return 4
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lay out a package as pip installs it, with entry points and what it holds, in a folder that Python searches."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def lay_out(package: str, commands: dict[str, str], **modules: str) -> None:
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
            monkeypatch.delitem(sys.modules, module, raising=False)
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
        lines = [f"{name} = {place}" for name, place in commands.items()]
        (info / "entry_points.txt").write_text("\n".join(["[gymnasium_bridge.commands]", *lines]), encoding="utf-8")

    return lay_out


def test_the_help_lists_commands_of_other_packages_and_imports_none(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("greeter", {"greet": "greet"}, greet="raise SystemExit('imported')")
    assert main(["--help"]) == 0
    assert re.search(r"^    greet +of the package greeter$", capsys.readouterr().out, re.MULTILINE)
    assert "greet" not in sys.modules


def test_a_command_of_another_package_runs_with_its_exit_codes_and_alone(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("greeter", {"greet": "greet", "other": "other"}, greet=GREET, other="raise OSError")
    assert main(["greet", "--name", "Ann"]) == 4
    assert capsys.readouterr().out == "hello Ann False\n"
    assert main(["greet", "--name", "nobody"]) == 7
    assert "unexpected KeyError: 'nobody' (--debug shows where)" in capsys.readouterr().err
    assert main(["greet", "--nam3", "x"]) == 2
    assert "did you mean --name?" in capsys.readouterr().err
    assert main(["great"]) == 2
    assert "there is no command 'great'; did you mean greet?" in capsys.readouterr().err


def test_a_command_may_be_an_object_of_a_module(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"{GREET}\nclass Greeter:\n    register = staticmethod(register)\n\ngreeter = Greeter()\ndel register\n"
    install("greeter", {"greet": "greet:greeter"}, greet=source)
    assert main(["greet"]) == 4
    assert capsys.readouterr().out == "hello you False\n"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import module_that_is_not_there", "cannot be loaded: ModuleNotFoundError: No module named 'module_that_is"),
        ("raise SystemExit(0)", "cannot be loaded: SystemExit: 0"),
        ("raise ValueError('two\\nlines')", "cannot be loaded: ValueError: two"),
        ("", "cannot be loaded: AttributeError: module 'greet' has no attribute 'register'"),
        ("def register(commands): 1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("def register(commands): commands.add_parser('grunt')", "to add a parser 'greet' with a default run"),
        ("def register(commands): commands.add_parser('greet')", "to add a parser 'greet' with a default run"),
    ],
    ids=["import", "exit", "raise", "no-register", "register", "other-name", "no-run"],
)
def test_a_broken_command_is_told_by_name_and_breaks_nothing_else(
    install: Install, capsys: pytest.CaptureFixture[str], source: str, told: str
) -> None:
    install("greeter", {"greet": "greet"}, greet=source)
    assert main(["greet"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("gymnasium-bridge: the command greet of the package greeter ")
    assert told in said.err
    assert "uninstall greeter" in said.err
    assert main(["token"]) == 0
    assert main(["--help"]) == 0


def test_the_traceback_of_a_broken_command_is_shown_on_demand(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("greeter", {"greet": "greet"}, greet="raise ValueError('broken')")
    assert main(["greet", "--debug"]) == 2
    assert "greet.py" in capsys.readouterr().err


def test_no_package_takes_the_place_of_a_command_of_ours(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("greeter", {"token": "greet", "serve": "greet"}, greet="raise OSError('imported')")
    assert main(["token"]) == 0
    assert main(["--help"]) == 0
    assert "greeter" not in capsys.readouterr().out
    assert "greet" not in sys.modules


def test_two_packages_with_a_command_of_one_name_are_both_told(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("greeter", {"greet": "greet"}, greet=GREET)
    install("polite", {"greet": "courtesy"}, courtesy=GREET)
    assert main(["greet"]) == 2
    assert "a command greet each: uninstall all but one" in capsys.readouterr().err


def test_the_command_of_the_page_on_plugins_runs(install: Install) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    section = page.partition("\n## A sub-command\n")[2].partition("\n## ")[0]
    blocks = dict(re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', section, re.MULTILINE | re.DOTALL))
    project = tomllib.loads(blocks["pyproject.toml"])["project"]
    install(
        project["name"],
        project["entry-points"]["gymnasium_bridge.commands"],
        bridge_count=blocks["bridge_count.py"],
    )
    with serve_gym("CartPole-v1") as server:
        done = run(
            *("-m", "bridge", "count", server.url, "--seed", "1"),
            env={**os.environ, "PYTHONPATH": sys.path[0]},
            bare=True,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"\d+ steps\n", done.stdout)


LACKING = """
import sys

lacking = sys.argv.pop(1)

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name == lacking or name.startswith(lacking + "."):
            raise ModuleNotFoundError(f"No module named {lacking!r}", name=lacking)

sys.meta_path.insert(0, Lacking())
from bridge.cli import main
sys.exit(main(sys.argv[1:]))
"""


def lacking(feature: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in an installation that lacks a folder of the package."""
    return run("-c", LACKING, f"bridge.{feature}", *words, bare=True)


@pytest.mark.parametrize(
    ("feature", "commands"),
    [
        ("perlert", ["lobby"]),
        ("recording", ["runs", "replay", "export"]),
        ("web", ["web"]),
        ("policies", ["policy", "evaluate"]),
        ("fleet", ["health", "top"]),
        ("testing", ["check", "demo"]),
        ("standalone", ["standalone"]),
    ],
)
def test_commands_of_a_feature_that_an_installation_lacks_are_gone_from_the_help_and_say_why(
    feature: str, commands: list[str]
) -> None:
    listed = lacking(feature, "--help")
    assert listed.returncode == 0, listed.stderr
    shown = set(re.findall(r"^    (\w+)", listed.stdout, re.MULTILINE))
    assert {"serve", "info", "token"} <= shown
    assert not shown & set(commands)
    done = lacking(feature, commands[0], "x")
    assert done.returncode == 2
    assert (
        done.stderr
        == f"gymnasium-bridge: this installation lacks bridge.{feature}, which the command {commands[0]} needs\n"
    )


@pytest.mark.parametrize(
    ("feature", "words", "told"),
    [
        ("recording", ["serve", "CartPole-v1", "--record=runs"], "lacks bridge.recording, which --record needs"),
        ("recording", ["serve", "x", "--record-max-bytes", "9"], "lacks bridge.recording, which --record needs"),
        ("perlert", ["serve", "CartPole-v1", "--perlert", "0"], "lacks bridge.perlert, which --perlert needs"),
        ("web", ["serve", "CartPole-v1", "--web-hosts", "a.example"], "lacks bridge.web, which --web needs"),
        ("perlert", ["web", "perlert://127.0.0.1:1/x:0"], "lacks bridge.perlert, which a URL of perlert:// needs"),
        ("fleet", ["web", "ray://cart"], "lacks bridge.fleet, which a URL of ray:// needs"),
        ("dial", ["info", "listen://127.0.0.1:1"], "lacks bridge.dial, which a URL of listen:// needs"),
        ("web", ["serve", "CartPole-v1", "--web"], "lacks bridge.web, which --web needs"),
        ("dial", ["serve", "CartPole-v1", "--dial", "grpc://127.0.0.1:1"], "lacks bridge.dial, which --dial needs"),
        ("openenv", ["serve", "CartPole-v1", "--web", "--openenv"], "lacks bridge.openenv, which --openenv needs"),
    ],
)
def test_an_option_or_url_of_a_feature_that_an_installation_lacks_is_refused(
    feature: str, words: list[str], told: str
) -> None:
    done = lacking(feature, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr


USES = """
import sys
import bridge
exec("from bridge import *")
with serve_gym("CartPole-v1") as server, make_remote(server.url) as env:
    env.reset(seed=0)
    for use in sys.argv[1:]:
        try:
            eval(use)
        except bridge.errors.SettingError as error:
            print(error)
"""
# Uses of a feature, and what is told where an installation lacks it.
LACKED = {
    "recording": {
        "serve_gym('CartPole-v1', record='runs')": "which record= needs",
        "bridge.Recording": "which bridge.Recording needs",
        "bridge.recording": "which this program needs",
        "bridge.perlert.serve_perlert('CartPole-v1', record='runs')": "which record= needs",
    },
    "web": {
        "serve_gym('CartPole-v1', web=True)": "which web= needs",
        "serve_parallel('x', fps=30, match=True)": "which match=True needs",
        "bridge.Web": "which bridge.Web needs",
    },
    "dial": {
        "serve_gym('CartPole-v1', dial='grpc://127.0.0.1:1')": "which dial= needs",
        "server.dial('grpc://127.0.0.1:1')": "which dial= needs",
        "make_vec_remote('listen://127.0.0.1:0', num_envs=1)": "which a URL of listen:// needs",
        "bridge.testing.check_server('listen://127.0.0.1:1')": "which a URL of listen:// needs",
    },
    "openenv": {
        "serve_gym('CartPole-v1', web=True, openenv=True)": "which openenv= needs",
        "make_remote('openenvs://127.0.0.1:1')": "which a URL of openenvs:// needs",
        "make_vec_remote('openenv://127.0.0.1:1', num_envs=2)": "which a URL of openenv:// needs",
    },
    "perlert": {
        "bridge.perlert": "which this program needs",
        "make_remote('perlert://127.0.0.1:1/x:0')": "which a URL of perlert:// needs",
        "make_vec_remote(['perlert://127.0.0.1:1/x:0'])": "which a URL of perlert:// needs",
    },
}


@pytest.mark.parametrize("feature", LACKED)
def test_what_needs_a_feature_that_an_installation_lacks_says_so_and_the_rest_works(
    tmp_path: Path, feature: str
) -> None:
    program = LACKING.partition("from bridge.cli")[0] + USES
    done = run("-c", program, f"bridge.{feature}", *LACKED[feature], cwd=tmp_path, bare=True)
    told = [f"this installation lacks bridge.{feature}, {words}" for words in LACKED[feature].values()]
    assert (done.stdout.splitlines(), done.stderr) == (told, "")


@pytest.mark.parametrize("command", ["check", "info", "bench", "play", "health"])
def test_every_command_calls_what_it_connects_to_by_the_same_word(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    assert "URL" in usage
    assert not re.search(r"\burl\b", usage)
    assert not re.search(r"^  url\b", rest, re.MULTILINE)
