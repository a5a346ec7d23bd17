"""Every block of Python in the pages of docs/ runs as a reader runs it: a file, in a process of its own.

Where a page has a server in one terminal and a client in another, these are two processes here. Blocks that serve
until Ctrl-C are interrupted, and must end with exit code 0. Replaced are addresses, and numbers of environments. A new
block needs an entry in `BLOCKS`, or the name of the test that runs it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bridge import make_remote, serve_gym
from bridge.core.transport.credentials import write_secret
from bridge.recording.reader import read_folder
from bridge.testing import make_certificates
from tests.places import ROOT
from tests.preloaded import Program, run
from tests.project.processes import waits_for_sigterm
from tests.support import free_port, until

DOCS = ROOT / "docs"
DEADLINE = 60.0

Terminal = Callable[[], AbstractContextManager[Mapping[str, str]]]
"""Runs the page's other terminal, and returns values for the names in braces of `Block.replace`."""


@contextlib.contextmanager
def nothing() -> Iterator[Mapping[str, str]]:
    """No other terminal; a free port for the block itself."""
    yield {"port": str(free_port())}


@dataclass(frozen=True)
class Block:
    """How a block is run."""

    replace: dict[str, str] = field(default_factory=dict)
    """Texts of the page, and what stands for them here: other addresses, fewer environments."""
    beside: Terminal = nothing
    before: str = ""
    """Lines that the page's reader has already: the names that the block uses."""
    after: str = ""
    """Checks, and the end of what the block leaves open."""
    serves: bool = False
    """True if it runs until Ctrl-C."""


@dataclass(frozen=True)
class Elsewhere:
    """A block that another test runs."""

    test: str


def parts(url: str) -> Mapping[str, str]:
    """A server's URL for a block: whole, and its port."""
    plain = url.partition("?")[0]
    return {"url": url, "port": plain.rpartition(":")[2].partition("/")[0]}


def command(*words: str) -> Terminal:
    """`gymnasium-bridge serve` with these words in the other terminal."""

    @contextlib.contextmanager
    def run() -> Iterator[Mapping[str, str]]:
        with child("-m", "bridge", "serve", *words, "--port", "0") as printed:
            listed = Path("urls.txt").resolve()
            listed.write_text(printed["url"], encoding="utf-8")
            yield {**printed, "directory": listed.as_uri()}

    return run


def with_certificates(beside: Terminal) -> Terminal:
    """The same where the page has made certificates and a token before."""

    @contextlib.contextmanager
    def run() -> Iterator[Mapping[str, str]]:
        make_certificates(Path("certs"), ["127.0.0.1", "localhost"])
        write_secret("token", b"a-secret")
        with beside() as names:
            yield names

    return run


def secure(*words: str) -> Terminal:
    """`gymnasium-bridge serve` with TLS and a token."""
    tls = ("--tls-certificate", "certs/server.pem", "--tls-key", "certs/server.key")
    return with_certificates(command(*words, "--token-file", "token", *tls))


def block_of(page: str, number: int) -> Terminal:
    """Another block of the pages, which serves."""

    @contextlib.contextmanager
    def run() -> Iterator[Mapping[str, str]]:
        block = BLOCKS[page][number]
        assert isinstance(block, Block)
        with block.beside() as names, serving(code_of(page, number, names)) as printed:
            yield {**names, **printed}

    return run


@contextlib.contextmanager
def recorded() -> Iterator[Mapping[str, str]]:
    """A folder `runs` with an episode in it."""
    with serve_gym("CartPole-v1", record="runs/") as server, contextlib.closing(make_remote(server.url)) as env:
        env.reset(seed=0)
        while not env.step(1)[2]:
            pass
    (episode,) = (found for found in read_folder("runs/").episodes() if found.length)
    yield {"episode": f"runs/{episode.id}"}


@contextlib.contextmanager
def replayed() -> Iterator[Mapping[str, str]]:
    """`gymnasium-bridge replay --serve` of a recorded episode in the other terminal."""
    with recorded() as names, child("-m", "bridge", "replay", names["episode"], "--serve") as printed:
        yield printed


@contextlib.contextmanager
def dialed() -> Iterator[Mapping[str, str]]:
    """`gymnasium-bridge serve --dial` in the other terminal: it dials until somebody listens at the port."""
    port = free_port()
    dial = ["--dial", f"grpcs://127.0.0.1:{port}", "--dial-ca", "certs/ca.pem"]
    with child("-m", "bridge", "serve", "CartPole-v1", *dial, BRIDGE_TOKEN="a-secret"):
        yield {"port": str(port)}


@contextlib.contextmanager
def child(*words: str, port: int | None = None, **variables: str) -> Iterator[Mapping[str, str]]:
    """Run a program until it listens at a port, or has printed a URL, and interrupt it in the end."""
    log = Path(f"printed-{free_port()}.txt")
    with log.open("wb") as output:
        process = Program(*words, stdout=output.fileno(), stderr=output.fileno(), env={**os.environ, **variables})

    def ready() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        # Until a program waits for signals, Ctrl-C is a KeyboardInterrupt wherever it happens to be.
        if not waits_for_sigterm(process.pid):
            return False
        if port is None:
            return re.search(r"\w+://\S+", log.read_text(encoding="utf-8")) is not None
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        return False

    try:
        until(ready, DEADLINE)
        found = re.search(r"\w+://\S+", log.read_text(encoding="utf-8"))
        yield parts(found[0]) if found and port is None else {}
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 0, log.read_text(encoding="utf-8")
        assert "Traceback" not in log.read_text(encoding="utf-8")
    finally:
        process.__exit__()


@contextlib.contextmanager
def serving(code: str) -> Iterator[Mapping[str, str]]:
    """Run a block that serves, until Ctrl-C."""
    file = Path(f"serving_{free_port()}.py")
    file.write_text(code, encoding="utf-8")
    named = re.search(r"\bport=(\d+)", code)
    port = int(named[1]) if named and named[1] != "0" else None
    with child("-W", "error", str(file), port=port) as printed:
        yield printed


CARTPOLE = command("CartPole-v1")
SECURE = secure("CartPole-v1")
RESET = "\nenvs.reset(seed=0)\nenvs.close()\n"
HERE = {"port=50051": "port={port}"}
LOCAL = {"127.0.0.1:50051": "127.0.0.1:{port}"}

BLOCKS: dict[str, list[Block | Elsewhere]] = {
    "cluster.md": [
        Block(
            {"envs.default.svc:50051": "localhost:{port}", "num_envs=256": "num_envs=2", '"ca.pem"': '"certs/ca.pem"'},
            SECURE,
            after=RESET,
        ),
        Block({"file:///shared/urls.txt": "{directory}", "num_envs=4096": "num_envs=2"}, CARTPOLE, after=RESET),
        Block({"file:///shared/urls.txt": "{directory}", "num_envs=256": "num_envs=2"}, CARTPOLE, after=RESET),
        Elsewhere("tests/ray/test_docs.py"),
    ],
    "environments.md": [
        *[Elsewhere("tests/standalone/test_command_line.py")] * 2,
    ],
    "limits.md": [Elsewhere("tests/core/encoding/test_conversions.py")],
    "performance.md": [
        Block({"num_envs=32": "num_envs=2"}, after="    envs.reset(seed=0)\n    envs.close()\n"),
        Block(
            {"at_least=48": "at_least=1", "while training:": "for _ in range(9):"},
            CARTPOLE,
            before="from bridge import make_vec_remote\nenvs = make_vec_remote('{url}', num_envs=2)\n"
            "def policy(observations): return envs.action_space.sample()[: len(observations)]\n",
            after="envs.recv(at_least=2)\nenvs.close()\n",
        ),
    ],
    "perlert.md": [
        Block({"port=32322": "port=0"}, serves=True),
        Block({"perlert://127.0.0.1:32322/cartpole:0": "{url}"}, block_of("perlert.md", 0)),
    ],
    "play.md": [
        Block(
            before="import numpy as np\nactions = np.zeros(2, int)\n"
            "infos = {'intervene_action': np.array([0, 1]), '_intervene_action': np.array([False, True])}\n",
            after="assert executed.tolist() == [0, 1]\n",
        ),
        Block(serves=True),
    ],
    "policies.md": [
        Block({"port=8000": "port={port}"}, serves=True),
        Block(
            {"localhost:8000": "localhost:{port}"},
            block_of("policies.md", 0),
            after="assert action == 0 and actions.shape == (64,)\n",
        ),
        Block({"episodes=20": "episodes=4"}),
    ],
    "protocol.md": [Elsewhere("tests/testing/test_conformance.py")],
    "realtime.md": [
        Block(HERE, serves=True),
        Block(LOCAL, block_of("realtime.md", 0), after=RESET),
        Block(after="env.reset()\nenv.close()\nserver.stop()\n"),
        Block({"port=50051": "port=0"}),
        Block(),
        Block(HERE, serves=True),
        Block(LOCAL, block_of("realtime.md", 5), after="assert abs(observation[0] - 0.5) < 0.2, observation\n"),
    ],
    "recordings.md": [
        Block(HERE, serves=True),
        Block(
            beside=recorded,
            before="import glob, shutil\n(one,) = glob.glob('runs/*.parquet')\n"
            "shutil.copy(one, one.replace('.000001.', '.000002.'))\n"  # more of the same stream
            "shutil.copy(one, one.replace('.1.000001.', '.2.000001.'))\n",  # another world
            after="assert returns.iloc[0] == 2 * returns.iloc[1] and len(returns) == 2, returns\n",
        ),
        Block({"runs/20261122T140501-3fa9c1-1.0.17": "{episode}"}, recorded),
        Block(
            {"localhost:50051": "localhost:{port}", '"seek")(100)': '"seek")(5)'}, replayed, after="watcher.close()\n"
        ),
        Block({**LOCAL, "num_envs=8": "num_envs=2"}, CARTPOLE, after=RESET),
    ],
    "plugins.md": [
        Elsewhere("tests/cli/test_commands.py"),
        Elsewhere("tests/core/server/test_messages.py"),
        *[Elsewhere("tests/core/server/test_port_protocols.py")] * 3,
        *[Elsewhere("tests/core/client/test_make_schemes.py")] * 2,
        Elsewhere("tests/core/worlds/test_turn_pacers.py"),
    ],
    "reference.in.md": [Elsewhere("tests/project/test_readme.py")],
    "reference.md": [Elsewhere("tests/project/test_readme.py")],  # made of it
    "security.md": [
        Block({"port=50051": "port={port}", '"0.0.0.0"': '"127.0.0.1"'}, with_certificates(nothing), serves=True),
        Block({"gpu-box.lan:50051": "127.0.0.1:{port}"}, block_of("security.md", 0), after=RESET),
    ],
    "states.md": [
        Block({"localhost:50051": "localhost:{port}", "num_envs=64": "num_envs=4"}, CARTPOLE, after="envs.close()\n"),
    ],
    "trainers.md": [
        Elsewhere("tests/trainers/test_sb3_callback.py"),
        Elsewhere("tests/core/client/test_lost_slots.py"),
        Block(
            {"localhost:8000": "localhost:{port}"},
            command("CartPole-v1", "--web", "--openenv"),
            after="env.close()\nenvs.close()\n",
        ),
    ],
    "two-machines.md": [
        Block({"game-pc:50051": "127.0.0.1:{port}"}, SECURE),  # tests/network runs it on two machines
        Block(
            {"0.0.0.0:6000": "127.0.0.1:{port}", "num_envs=8": "num_envs=2"},
            with_certificates(dialed),
            after="envs.close()\n",
        ),
    ],
}


def python_blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python(?: title=[^\n]*)?\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def code_of(page: str, number: int, names: Mapping[str, str]) -> str:
    """The file that a block is run as."""
    block = BLOCKS[page][number]
    assert isinstance(block, Block)
    code = python_blocks(page)[number]
    for text, other in block.replace.items():
        assert text in code, f"docs/{page} has no {text!r} any more"
        code = code.replace(text, filled(other, names))
    return filled(block.before, names) + code + block.after


def filled(text: str, names: Mapping[str, str]) -> str:
    """The text with what the other terminal gives in place of the names in braces."""
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def test_each_block_has_an_entry() -> None:
    counts = {path.name: len(python_blocks(path.name)) for path in DOCS.glob("*.md")}
    assert {page: count for page, count in counts.items() if count} == {
        page: len(found) for page, found in BLOCKS.items()
    }


def test_the_tests_that_run_blocks_elsewhere_name_their_page() -> None:
    for page, found in BLOCKS.items():
        for block in found:
            if isinstance(block, Elsewhere):
                assert page in (ROOT / block.test).read_text(encoding="utf-8"), (page, block.test)


CASES = [
    pytest.param(page, number, id=f"{page}-{number}")
    for page, found in BLOCKS.items()
    for number, block in enumerate(found)
    if isinstance(block, Block)
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), CASES)
def test_a_block_runs(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = BLOCKS[page][number]
    assert isinstance(block, Block)
    with block.beside() as names:
        code = code_of(page, number, names)
        if block.serves:
            with serving(code):
                return
        file = tmp_path / "block.py"
        file.write_text(code, encoding="utf-8")
        done = run("-W", "error", file, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (0, "")
