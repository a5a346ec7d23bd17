"""Every block of Python in the pages of docs/ runs, beside what its page says is there.

`tests/test_readme.py` runs those of the README and of docs/api.md, with what they print. A new block needs an entry in
`BLOCKS`, or the name of the test that runs it.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import bridge
from bridge import TLS, make_remote, make_vec_remote, serve_gym
from bridge.client.endpoints import Endpoint
from bridge.recording.reader import read_folder
from bridge.testing import make_certificates
from bridge.transport.credentials import write_secret
from bridge.wrappers import BlockingReset

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Block:
    """How a block is run."""

    replace: dict[str, str] = field(default_factory=dict)
    """Texts of the page, and what stands for them here: other ports, fewer environments."""
    before: str = ""
    """Code that runs first: what the page's reader has already."""
    after: str = ""
    """Code that runs last: checks, and closes what the block leaves open."""


@dataclass(frozen=True)
class Elsewhere:
    """A block that another test runs."""

    test: str


SERVE = "server = serve_gym('CartPole-v1')\n"
SECURE = "server = serve_secure('CartPole-v1')\n"
CLOSE = "\nenvs.close()\nserver.stop()\n"
RESET = "\nenvs.reset(seed=0)" + CLOSE
SHORT = {".wait()": ".stop()", "port=50051": "port=0", '"0.0.0.0"': '"127.0.0.1"'}
URLS = {'"file:///home/me/urls.txt"': "file_url", '"file:///shared/urls.txt"': "file_url"}

BLOCKS: dict[str, list[Block | Elsewhere]] = {
    "api.md": [Elsewhere("tests/test_readme.py")] * 2,
    "cluster.md": [
        Block(
            {
                '"grpcs+dns://envs.default.svc:50051"': "server.url",
                "num_envs=256": "num_envs=2",
                '"ca.pem"': '"certs/ca.pem"',
            },
            SECURE,
            RESET,
        ),
        Elsewhere("tests/fleet/test_docs.py"),
        Block(
            {
                '"grpc+dns://envs.default.svc:50051"': "server.url.partition('?')[0]",
                "num_envs=128": "num_envs=2",
                "/run/secrets/envs/": "",
            },
            "write_secret('token', b'secret')\nserver = serve_gym('CartPole-v1', token_file='token')\n",
            RESET,
        ),
        Block({**URLS, "num_envs=4096": "num_envs=2"}, SERVE + "file_url = write_urls(server.url)\n", RESET),
    ],
    "conformance.md": [
        Block(
            {},
            SERVE + "class our_server:\n    port = server.port\n",
            "test_our_server_keeps_to_the_protocol(our_server)\nserver.stop()",
        ),
        Block(),
    ],
    "conversions.md": [Elsewhere("tests/test_conversions.py")],
    "dial.md": [
        Block(
            {"0.0.0.0:6000": "127.0.0.1:{port}", '"listen': 'f"listen', "num_envs=8": "num_envs=2"},
            "import socket\n"
            "with socket.create_server(('127.0.0.1', 0)) as free:\n    port = free.getsockname()[1]\n"
            "serve_secure('CartPole-v1').stop()\n"
            "dial = {'dial': f'grpcs://127.0.0.1:{port}', 'dial_ca': 'certs/ca.pem', 'token': 'a-secret'}\n"
            "server = serve_gym('CartPole-v1', **dial)\n",
            CLOSE,
        )
    ],
    "openenv.md": [
        Block({**SHORT, "port=8000": "port=0"}),
        Block(
            {'"openenv://localhost:8000"': "server.web_url.rstrip('/').replace('http', 'openenv')"},
            "server = serve_gym('CartPole-v1', web=True, openenv=True)\n",
            "env.close()" + CLOSE,
        ),
    ],
    "other-servers.md": [Block({'"grpc://localhost:50051?world="': "server.url + '?world='"}, SERVE, "server.stop()")],
    "performance.md": [
        Block({"num_envs=32": "num_envs=2"}, "", "    envs.reset(seed=0)\n    envs.close()\n"),
        Block(
            {"at_least=48": "at_least=1", "while training:": "for _ in range(9):"},
            SERVE + "envs = make_vec_remote(server.url, num_envs=2)\n"
            "def policy(observations): return envs.action_space.sample()[: len(observations)]\n",
            "envs.recv(at_least=2)" + CLOSE,
        ),
    ],
    "old-python.md": [Elsewhere("tests/test_standalone.py")] * 2,
    "perlert.md": [
        Block(
            {
                "with serve_perlert(": "server = serve_perlert(",
                " as server:\n": "\nif server:\n",
                "    server.wait()\n": "",
                '"perlert://127.0.0.1:32322/cartpole:0"': "server.url",
            },
            "",
            "env.close()\nserver.stop()",
        )
    ],
    "realtime.md": [
        Block(SHORT),
        Block({}, "server = serve_gym('CartPole-v1', fps=30)\nurl_a = url_b = server.url\n", RESET),
        Block(
            {},
            "",
            "env.reset()\nenv.close()\nserver.stop()",
        ),
        Block({"    …\n": "    envs.reset(seed=0)\n"}, "", "    envs.close()\n"),
        Block({}, "", "server.stop()\n"),
        Block({}, "server = serve_gym('Pendulum-v1', fps=50)\n", "env.close()\nserver.stop()\n"),
    ],
    "reconnect.md": [
        Block(
            {
                **URLS,
                '"grpc+dns://envs.default.svc:50051"': "server.url",
                "num_envs=64": "num_envs=2",
                "num_envs=256": "num_envs=2",
                "envs =": "made[len(made)] =",
            },
            SERVE + "file_url = write_urls(server.url)\nmade = {}\n"
            "class directory:\n    @staticmethod\n    def endpoints(): return [Endpoint(server.url)]\n",
            "assert len(made) == 3\nfor envs in made.values(): envs.close()\nserver.stop()",
        )
    ],
    "policies.md": [
        Block({"port=8000": "port=0", "server.wait()": "server.stop()"}),
        Block(
            {'"ws://localhost:8000"': "server.url"},
            "from bridge.policies import serve_policy\n"
            "server = serve_policy(lambda observations: (observations[:, 2] > 0).astype(int))\n",
            "\nassert action == 0 and actions.shape == (64,)\nserver.stop()\n",
        ),
        Block(after="\nassert server.url\nserver.stop()\n"),
        Block({"episodes=20": "episodes=4"}),
    ],
    "recordings.md": [
        Block(SHORT),
        Block(before="from pathlib import Path\n\nfolder = Path(record_episode()).parent\n"),
        Block({'"runs/20261122T140501-3fa9c1-1.0.17"': "record_episode()"}),
        Block(
            {'"grpc://localhost:50051?world="': "server.url + '?world='", '"seek")(100)': '"seek")(5)'},
            "from bridge import TLS, make_remote\nfrom bridge.recording.player import serve_episode\n"
            "server = serve_episode(record_episode())\n",
            "watcher.close()\nserver.stop()",
        ),
        Block({}, SERVE + "urls = [server.url]\n", RESET),
    ],
    "play.md": [
        Block({"    server.wait()\n": "    pass\n"}),
        Block(
            {},
            "import numpy as np\nactions = np.zeros(2, int)\n"
            "infos = {'intervene_action': np.array([0, 1]), '_intervene_action': np.array([False, True])}\n",
            "assert executed.tolist() == [0, 1]\n",
        ),
        Block(
            {'"grpcs://teacher.lan:50051/CartPole-v1"': 'server.url + "/CartPole-v1"'},
            "server = serve_secure(['CartPole-v1', 'MountainCar-v0'], fps=30)\n",
            "envs.step(envs.action_space.sample())" + CLOSE,
        ),
    ],
    "trainers.md": [Elsewhere("tests/test_lost_slots.py"), Elsewhere("tests/test_lost_slots.py")],
    "trust.md": [
        Block(SHORT, SECURE + "server.stop()\n"),
        Block({'"grpcs://gpu-box.lan:50051"': "server.url"}, SECURE, CLOSE),
    ],
    "two-machines.md": [Block({'"grpcs://game-pc:50051"': "server.url"}, SECURE, "server.stop()")],
}


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize(("page", "number"), CASES)
def test_a_block_runs(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = BLOCKS[page][number]
    assert isinstance(block, Block)
    code = python_blocks(page)[number]
    for text, other in block.replace.items():
        if text not in (*SHORT, *URLS):
            assert text in code, f"docs/{page} has no {text!r} any more"
        code = code.replace(text, other)
    scope = dict(IN_SCOPE)
    try:
        exec(compile(block.before + code + block.after, page, "exec"), scope)
    except BaseException:  # what the block would have closed, so that the tests that follow do not fail too
        for value in scope.values():
            if isinstance(value, (gymnasium.Env, gymnasium.vector.VectorEnv)):
                value.close()
        for value in scope.values():
            if isinstance(value, bridge.Server):
                value.stop()
        raise


def serve_secure(env: Any, **keywords: Any) -> bridge.Server:
    """Serve with TLS and a token, in whose files the pages' clients find what they need."""
    make_certificates(Path("certs"), ["127.0.0.1"])
    write_secret("token", b"secret")
    return serve_gym(env, token_file="token", tls=TLS("certs/server.pem", "certs/server.key"), **keywords)


def write_urls(*urls: str) -> str:
    """Write a directory of servers, and return its URL."""
    Path("urls.txt").write_text("\n".join(urls))
    return Path("urls.txt").resolve().as_uri()


def record_episode() -> str:
    """Record an episode of ten steps or so, and return where it is."""
    with serve_gym("CartPole-v1", record="runs/") as server, contextlib.closing(make_remote(server.url)) as env:
        env.reset(seed=0)
        while not env.step(1)[2]:
            pass
    (episode,) = (found for found in read_folder("runs/").episodes() if found.length)
    return f"runs/{episode.id}"


IN_SCOPE = {
    "BlockingReset": BlockingReset,
    "Endpoint": Endpoint,
    "Path": Path,
    "make_vec_remote": make_vec_remote,
    "record_episode": record_episode,
    "serve_gym": serve_gym,
    "serve_secure": serve_secure,
    "write_secret": write_secret,
    "write_urls": write_urls,
}
"""What a page's reader has imported already, and what the entries use."""
