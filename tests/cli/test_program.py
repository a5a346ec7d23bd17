"""The command line, whatever the sub-command: options in errors, Ctrl-C, and who adds a command."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.cli import main, program
from bridge.cli.program import positive
from tests.inside import add_command
from tests.preloaded import run
from tests.support import sampled

DEADLINE = 30.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pass tls=TLS(ca=…) or", "pass --tls-ca or"),
        ("expected tls=TLS(ca='x', key=…), got", "expected --tls-ca 'x' and --tls-key, got"),
        ("limits=Limits(num_envs=5) and TLS(…)", "--num-envs 5 and TLS(…)"),
        ("in use; port=0 takes any, port 5 does not", "in use; --port 0 takes any, port 5 does not"),
        ("expected token or token_file, got both", "expected token or --token-file, got both"),
        ("made with env_kwargs={'a': 1}: no", "made with --env-kwargs {'a': 1}: no"),
        ("with fork=True, x=5, grpc://a?port=5 and 'num_envs'", "with --fork, x=5, grpc://a?port=5 and 'num_envs'"),
    ],
)
def test_errors_speak_in_options(text: str, expected: str) -> None:
    names = ("tls_ca", "tls_key", "port", "token", "token_file", "env_kwargs", "fork", "num_envs")
    assert program.in_options(text, {name: f"--{name.replace('_', '-')}" for name in names}) == expected


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e300", "x"])
def test_a_number_of_seconds_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="expected a positive number"):
        positive(text)


def test_options_before_the_command_are_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "info", "localhost:1"]) == 2
    assert "there is no command '--debug'; `gymnasium-bridge --help` lists the commands" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="the shell closes the standard streams")
@pytest.mark.parametrize("command", [("serve", "CartPole-v1", "--exit-on-eof"), ("standalone",), ("token",)])
def test_commands_run_with_closed_standard_streams(command: tuple[str, ...]) -> None:
    """A server in whose place of standard input a socket was opened would take that socket's bytes for the input."""
    shell = ["sh", "-c", 'exec "$0" -m bridge "$@" <&- >&- 2>&-', sys.executable, *command]
    assert subprocess.run(shell, timeout=DEADLINE).returncode == 0
    shell[2] = shell[2].replace(" 2>&-", "")
    done = subprocess.run(shell, timeout=DEADLINE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow_command.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
        "except BaseException as error:\n    raise ImportError('a library makes this of it') from error\n"
    )
    code = "from bridge.cli import program; program.COMMANDS['slow'] = ('slow_command', ''); program.main(['slow'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run("-c", code, env=environment, bare=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gymnasium-bridge: interrupted\n")


def test_ctrl_c_while_the_command_itself_is_imported_is_one_line() -> None:
    code = (
        "import os, signal, sys, time\n"
        "class Finder:\n"
        "    def find_spec(name, *place):\n"
        "        if name == 'bridge.cli.program':\n"
        "            os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "from bridge.cli import main\n"
    )
    done = run("-c", code, bare=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gymnasium-bridge: interrupted\n")


_WITHOUT_EXTRAS = (
    "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(','))); from bridge.cli import main; "
    "sys.exit(main(sys.argv[2:]))"
)
_PACKAGES_OF_EXTRAS = (
    "pyarrow,websockets,PIL,msgpack,cryptography,rich,pygame,matplotlib,prometheus_client,grpc_health,"
    "grpc_reflection,av,minari,pettingzoo,ray,argcomplete"
)


@pytest.mark.parametrize("command", sampled(program.COMMANDS, 5, slow=True))
def test_the_help_of_a_command_needs_no_extra(command: str) -> None:
    done = run("-c", _WITHOUT_EXTRAS, _PACKAGES_OF_EXTRAS, command, "--help", bare=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "exit codes:" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    sampled(
        [
            (("runs", "runs"), "recordings need pyarrow: pip install -e '.[record]'"),
            (("replay", "runs", "--verify"), "recordings need pyarrow: pip install -e '.[record]'"),
            (("export", "runs", "--mp4", "films"), "recordings need pyarrow: pip install -e '.[record]'"),
            (
                ("policy", "json:dumps", "--port", "0"),
                "policies over the network need the packages msgpack and websockets: pip install",
            ),
            (("serve", "CartPole-v1", "--record", "runs"), "recordings need pyarrow: pip install"),
            (("serve", "CartPole-v1", "--web"), "--web needs the package websockets: pip install -e '.[web]'"),
            (
                ("serve", "CartPole-v1", "--metrics-port", "0"),
                "--metrics-port needs the package prometheus-client: pip",
            ),
            (
                ("serve", "CartPole-v1", "--perlert", "0", "--perlert-key-file", "key"),
                "a pre-shared key needs the package",
            ),
            (("evaluate", "grpc://127.0.0.1:1", "--policy", "ws://127.0.0.1:1"), "policies over the network need the"),
            (("info", "ws://127.0.0.1:1"), "ws:// needs the package websockets: pip install -e '.[web]'"),
            (("bench", "openenv://127.0.0.1:1"), "openenv:// needs the package websockets: pip install"),
            (("serve", "CartPole-v1", "--web", "--openenv"), "--openenv needs the package websockets: pip install"),
            (
                ("serve", "CartPole-v1", "--dial", "wss://127.0.0.1:1"),
                "wss:// needs the package websockets: pip install",
            ),
            (
                ("serve", "CartPole-v1", "--protocol", "websocket"),
                "the protocol 'websocket' needs the package websockets",
            ),
            (
                ("lobby", "perlert://127.0.0.1:1/x", "--key", "key"),
                "a pre-shared key needs the package cryptography: pip",
            ),
            (("web", "grpc://127.0.0.1:1", "--port", "0"), "web=True needs the package websockets: pip install"),
            (("play", "grpc://127.0.0.1:1"), "gymnasium-bridge play needs pygame: pip install -e '.[play]'"),
            (("top", "ray://cart", "--json"), "fleets on Ray need the package ray: pip install -e '.[ray]'"),
            (("cert", "--out", "certs"), "certificates are made by the package cryptography: pip install"),
            (("completion", "bash"), "completion needs the package argcomplete: pip install"),
        ],
        5,
        slow=True,
    ),
)
def test_a_command_of_an_extra_that_is_not_installed_says_in_a_line_how_to_install_it(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_bytes(b"k" * 32)
    done = run("-c", _WITHOUT_EXTRAS, _PACKAGES_OF_EXTRAS, *words, bare=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gymnasium-bridge: {said}")
    assert "pip install" in done.stderr
    assert done.stderr.count("\n") == 1


def test_another_module_adds_its_command_by_being_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "greet_command.py").write_text(
        "def register(commands):\n"
        "    parser = commands.add_parser('greet')\n"
        "    parser.set_defaults(run=lambda arguments: print('hello') or 0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    add_command(monkeypatch, "greet", "greet_command")
    assert main(["greet"]) == 0
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.slow
def test_the_help_has_the_name_that_no_other_program_has() -> None:
    for name in ("bridge", "gymnasium-bridge"):
        script = Path(sys.executable).parent / name
        done = subprocess.run([script, "top", "--help"], capture_output=True, text=True, timeout=DEADLINE, check=True)
        assert done.stdout.startswith("usage: gymnasium-bridge top ")
        assert "\n  gymnasium-bridge top grpc://" in done.stdout


def test_the_prose_of_a_help_fits_the_terminal() -> None:
    for command in ("evaluate", "demo", "play", "health"):
        done = run("-m", "bridge", command, "--help", env={**os.environ, "COLUMNS": "60"}, bare=True)
        assert done.returncode == 0, done.stderr
        prose = [line for line in done.stdout.splitlines() if not line.startswith(" ") and not line.endswith(":")]
        assert [line for line in prose if len(line) > 60] == []
        assert "\n  " in done.stdout.partition("examples:")[2], "commands are not divided"


@pytest.mark.parametrize(
    ("typed", "wanted"),
    sampled(
        [
            ("gymnasium-bridge ser", {"serve"}),
            ("gymnasium-bridge serve CartPole-v1 --num-e", {"--num-envs"}),
            ("gymnasium-bridge serve CartPole-v1 --isolation ", {"process"}),
            ("bridge export runs --lero", {"--lerobot"}),
            ("gymnasium-bridge completion ", {"bash", "zsh", "fish"}),
        ],
        5,
        1,
        slow=True,
    ),
)
def test_bash_completes_commands_options_and_choices(typed: str, wanted: set[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    folder = Path(sys.executable).parent
    script = (
        'eval "$(gymnasium-bridge completion bash)"; '
        f'COMP_LINE="{typed}"; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9; COMP_WORDS=({typed}); '
        f"COMP_CWORD=$(({len(typed.split(' '))} - 1)); _python_argcomplete {typed.split()[0]}; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
    )
    # Where a word that is no option may stand, the options of every command may, too.
    assert {*done.stdout.split()} - {"-h", "--help", "--debug"} == wanted, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_each_shell_names_both_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "gymnasium-bridge" in out
    assert "_ARGCOMPLETE" in out
