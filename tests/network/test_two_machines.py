"""docs/two-machines.md as it is printed: its commands and its code, on two machines, and each row of its table."""

from __future__ import annotations

import re
import shutil
import warnings
from signal import SIGINT

import pytest

from bridge import TLS, make_remote
from bridge.errors import BridgeError
from bridge.testing import make_certificates
from tests.network.machines import ROOT
from tests.network.programs import PORT, serve

PAGE = (ROOT / "docs" / "two-machines.md").read_text(encoding="utf-8")
INSTALL = 'pip install -e ".[cert]"'  # the tests' environment has it
ADDRESS = "192.168.1.20"


def blocks(language: str) -> list[list[str]]:
    return [block.splitlines() for block in re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]


def shell(machine, line, folder):
    """Run a command of the page as a shell does."""
    return machine.command("sh", "-c", f"exec {line}", folder=folder)


@pytest.fixture
def machines(network):
    """The two machines of the page, which has addresses of its own."""
    game, trainer = network.machine("game-pc"), network.machine("gpu")
    game.ip(f"address add {ADDRESS}/24 dev eth0")
    trainer.ip("address add 192.168.1.30/24 dev eth0")
    network.name("game-pc", ADDRESS)
    return game, trainer


@pytest.fixture
def folders(tmp_path):
    """A folder on each machine."""
    found = tmp_path / "on-game-pc", tmp_path / "on-gpu"
    for folder in found:
        folder.mkdir()
    return found


def test_the_page_works_as_printed(machines, folders):
    (game, trainer), (at_game, at_trainer) = machines, folders
    (install, serve_here), (bench,), (cert, token), (serve_all,) = blocks("sh")
    (train, _), (printed,) = blocks("python"), blocks("text")
    assert install == INSTALL

    here = shell(game, serve_here, at_game)
    here.prints(f"grpc://127.0.0.1:{PORT}")
    bench_done = shell(game, bench, at_game)
    assert bench_done.ended() == 0, bench_done.output
    here.signal(SIGINT)  # Ctrl-C
    assert here.ended() == 0, here.output

    for line in (cert, token):
        done = shell(game, line, at_game)
        assert done.ended() == 0, done.output
    # A firewall as Ubuntu's: nothing comes in but answers, until the port is opened.
    closed = ("ct state established accept", "iif lo accept")
    game.firewall(*closed, "drop")
    everywhere = shell(game, serve_all, at_game)
    everywhere.prints(str(PORT))
    game.firewall(*closed, f"tcp dport {PORT} accept", "drop")

    copied = re.search(r"Copy `(.*?)` and `(.*?)` there", PAGE).groups()
    for name in copied:
        (at_trainer / name).parent.mkdir(exist_ok=True)
        shutil.copy(at_game / name, at_trainer / name)
    trained = trainer.command("python", "-W", "error", "-c", "\n".join(train), folder=at_trainer)
    assert trained.ended() == 0, trained.output
    assert trained.output.splitlines() == printed
    info = re.search(r"From the command line: `(.*?)`", PAGE).group(1)
    asked = shell(trainer, info, at_trainer)
    assert asked.ended() == 0, asked.output
    assert "CartPole-v1" in asked.output
    assert everywhere.stop() == 0


def error_of(url, keywords):
    """Return what a client that cannot connect is told."""
    warnings.filterwarnings("ignore", "the token travels unencrypted", RuntimeWarning)
    try:
        make_remote(url, timeout=3.0, **keywords).close()
    except BridgeError as error:
        return str(error)
    return "connected"


SAYS = dict(re.findall(r"^\| ([^|]*?) \| ([^|]*?) \|$", PAGE.partition("## If it does not connect")[2], re.MULTILINE))
del SAYS["the error says"]
SAYS = {says: do for says, do in SAYS.items() if not says.startswith("---")}

ROWS = {
    "Connection refused": ({"host": "127.0.0.1"}, {}, "grpc"),
    "does a firewall stand between?": ({}, {}, "grpc"),
    "not for this name": ({"tls": "other"}, {"ca": "other"}, "grpcs"),
    "not signed by a CA that is trusted here": ({"tls": "right"}, {}, "grpcs"),
    "speaks no TLS": ({}, {}, "grpcs"),
    "does it speak TLS?": ({"tls": "right"}, {}, "grpc"),
    "a token is required, the token is wrong": ({"token": "secret"}, {"token": ""}, "grpc"),
}
"""For what the page says that an error says: the keywords of the server, those of the client, the URL's scheme."""


def test_each_row_of_the_table_is_tried():
    assert ROWS.keys() == SAYS.keys()


@pytest.mark.parametrize("says", ROWS)
def test_an_error_says_what_the_table_names(machines, tmp_path, says):
    game, trainer = machines
    of_server, of_client, scheme = ROWS[says]
    for name in {of_server.get("tls"), of_client.get("ca")} - {None}:
        make_certificates(tmp_path / name, ["game-pc" if name == "right" else "another-pc"])
    if "tls" in of_server:
        certs = tmp_path / of_server["tls"]
        of_server = {"tls": TLS(str(certs / "server.pem"), str(certs / "server.key"))}
    if "ca" in of_client:
        of_client = {"tls": TLS(ca=str(tmp_path / of_client["ca"] / "ca.pem"))}
    game.start(serve, "CartPole-v1", of_server).next()
    if "firewall" in says:
        game.firewall(f"tcp dport {PORT} drop")
    tokens = [{"token": None}, {"token": "wrong"}] if "token" in of_client else [of_client]
    for part, keywords in zip(says.split(", "), tokens, strict=True):
        told = trainer.run(error_of, f"{scheme}://game-pc:{PORT}", keywords)
        assert part in told
