"""Three walks through the pages: a newcomer's, a roboticist's and an operator's, typed in the order of the pages.

A terminal here is bash in an empty folder, with this Python's environment activated as the README says. Programs that
serve stay open in terminals of their own. Replaced are ports, addresses, numbers of episodes and environments, and what
a comment at the place names. Not typed are the lines that install something (they made this environment), the demo
(tests/cli/test_demo.py), and what needs PyTorch (tests/trainers).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import in_browser, says, shows
from tests.places import ROOT
from tests.project.processes import waits_for_sigterm
from tests.support import free_port, until

INSTALLS = ("make demo", "pip install")
DEADLINE = 120.0

pytestmark = pytest.mark.slow


@functools.cache
def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return the language and the content of each code block of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)(?: .*)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def block(page: str, begin: str) -> str:
    """Return the block of a page in which this text is."""
    (found,) = [content for _, content in blocks_of(page) if begin in content]
    return found


def lines_of(content: str) -> list[str]:
    """Return the commands of a block, without their comments and without those that install."""
    lines = [re.sub(r"\s+#.*$", "", line) for line in content.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith(INSTALLS)]


def replaced(text: str, others: dict[str, str]) -> str:
    for old, new in others.items():
        assert old in text, f"{old!r} is not in {text!r} any more"
        text = text.replace(old, new)
    return text


class Serving:
    """A terminal in which a program runs until Ctrl-C."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path):
        self.process = process
        self._log = log

    @property
    def printed(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def url(self, scheme: str = r"\w+") -> str:
        """Wait for a URL in what the program prints, and for the program to take signals; return the URL."""

        def ready() -> bool:
            assert self.process.poll() is None, self.printed
            return waits_for_sigterm(self.process.pid) and re.search(rf"\b{scheme}://\S+", self.printed) is not None

        until(ready, DEADLINE)
        return re.findall(rf"\b{scheme}://\S+", self.printed)[0]


class Desk:
    """The reader's folder, and the terminals that are open in it."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack):
        self.folder = folder
        self._stack = stack
        (folder / ".venv").symlink_to(sys.prefix)
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(folder), "HOME": str(folder)}
        self._environment |= {"MINARI_DATASETS_PATH": str(folder / "datasets")}
        self._count = 0

    def _bash(self, line: str) -> list[str]:
        return ["bash", "-c", f"source .venv/bin/activate && exec {line}"]

    def type(self, line: str, code: int = 0) -> str:
        """Type a command, wait for its end, and return what it printed."""
        done = subprocess.run(
            self._bash(line),
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    def open(self, line: str) -> Serving:
        """Type a command in a new terminal; it goes on, and in the end of the walk Ctrl-C stops it."""
        self._count += 1
        log = self.folder / f"terminal-{self._count}.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._bash(line), cwd=self.folder, env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )
        serving = Serving(process, log)
        self._stack.callback(self._close, serving)
        return serving

    def _close(self, serving: Serving) -> None:
        if serving.process.poll() is None:
            serving.process.send_signal(signal.SIGINT)
        try:
            serving.process.wait(DEADLINE)
        finally:
            serving.process.kill()
            serving.process.wait()

    def write(self, name: str, code: str) -> str:
        """Save a block as a file, and return the command that runs it."""
        (self.folder / name).write_text(code, encoding="utf-8")
        return f"python {name}"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with contextlib.ExitStack() as stack:
        yield Desk(tmp_path, stack)


@in_browser
def test_a_newcomer_goes_through_the_readme(desk: Desk, opened) -> None:
    here, wide = str(free_port()), str(free_port())
    blocks = blocks_of("README.md")
    kinds = [kind for kind, _ in blocks]
    assert kinds == ["sh", "python", "sh", "python", "python", "text", "sh", "python", "text"]
    assert blocks[0][1].splitlines()[:2] == ["make demo", "source .venv/bin/activate"]

    (_, serve) = lines_of(blocks[0][1])
    server = desk.open(replaced(serve, {"50051": here}))
    page = opened(server.url("http"))
    says(page, "body", "CartPole-v1 is ready.")
    # "In a second terminal with `.venv` activated, step what the page shows."
    client = desk.open(desk.write("connect.py", replaced(blocks[1][1], {"50051": here})))
    says(page, "#worlds", "● agent")
    shows(page, "() => document.getElementById('canvas').dataset.pictures > 5")
    assert client.process.wait(DEADLINE) == 0, client.printed
    assert client.printed == ""

    assert lines_of(blocks[2][1]) == []  # installs Stable-Baselines3, for the block that tests/trainers runs
    assert "stable_baselines3" in blocks[3][1]
    assert desk.type(desk.write("program.py", blocks[4][1])) == blocks[5][1]

    cert, token, serve = lines_of(blocks[6][1])
    desk.type(cert)
    desk.type(token)
    desk.open(replaced(serve, {"50051": wide, "--host 0.0.0.0 ": ""})).url("grpcs")
    # The certificate has this machine's names beside the one that is given.
    code = replaced(blocks[7][1], {"gpu-box.lan:50051": f"localhost:{wide}"})
    assert desk.type(desk.write("remote.py", code)) == blocks[8][1]


@in_browser
def test_a_roboticist_serves_a_policy_evaluates_corrects_and_makes_a_dataset(desk: Desk, opened) -> None:
    port, policy = str(free_port()), str(free_port())
    console = block("docs/policies.md", "corrected-v0").splitlines()
    saved, serve, alone, correct, export = lines_of("\n".join(console))
    assert saved.startswith("python examples/policy_sb3.py")  # tests/trainers: it needs PyTorch
    # The page's other way to serve a policy, as a function. Before the correction it waits for the person.
    (desk.folder / "my_module.py").write_text(
        "import os, time\nimport numpy as np\n\n\n"
        "def act(observations):\n"
        "    while os.path.exists('wait'):\n        time.sleep(0.01)\n"
        "    return np.zeros(len(observations), int)\n",
        encoding="utf-8",
    )
    assert "`gymnasium-bridge policy my_module:act`" in (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    desk.open(f"gymnasium-bridge policy my_module:act --port {policy}").url("ws")
    server = desk.open(replaced(serve, {"50051": port}))
    here = server.url("http")
    ports = {"localhost:50051": f"localhost:{port}", "localhost:8000": f"localhost:{policy}"}

    result = desk.type(replaced(alone, {**ports, "--episodes 100": "--episodes 6", "--num-envs 16": "--num-envs 2"}))
    assert re.match(r"6 episodes, \d+ steps in .*\nreturn ", result)

    (desk.folder / "wait").touch()
    evaluation = desk.open(replaced(correct, {**ports, "--episodes 20": "--episodes 2"}))
    page = opened(here)
    page.click("#worlds button:has-text('agent')")
    says(page, "#play", "Take over")
    page.click("#play")
    says(page, "#badge", "hold a key")
    (desk.folder / "wait").unlink()
    page.keyboard.down("ArrowUp")
    says(page, "#badge", "you act")
    shows(page, "() => document.getElementById('canvas').dataset.pictures > 5")
    page.keyboard.up("ArrowUp")
    page.keyboard.press("Escape")
    assert evaluation.process.wait(DEADLINE) == 0, evaluation.printed
    # Where the page's key comes up late, the person acts in the next episode, too.
    corrections = r"^others +acted in the policy's place in episode 0 \(\d+ steps\)(, 1 \(\d+ steps\))?$"
    assert re.search(corrections, evaluation.printed, re.MULTILINE)

    # The recording is complete once its worlds are closed.
    episodes = desk.type("gymnasium-bridge runs runs/")
    assert len(re.findall(r"LunarLander-v3", episodes)) >= 8
    desk.type(export)
    count = "import minari; print(minari.load_dataset('lander/corrected-v0').total_episodes)"
    assert int(desk.type(f'python -c "{count}"')) >= 1

    by_people = block("docs/recordings.md", "--who person").splitlines()[-1]
    desk.type(replaced(by_people, {"--min-return 100": "--min-return -1000"}))
    of_robots = block("docs/recordings.md", "--lerobot").splitlines()[-1]
    desk.type(replaced(of_robots, {"ALE/Pong*": "LunarLander*"}))
    assert json.loads((desk.folder / "datasets/pong/meta/info.json").read_text())["total_episodes"] == 8

    # "Look at it": the page's Replay has what somebody played, and `replay --verify` makes it again.
    corrected = next(line.split()[0] for line in episodes.splitlines() if "person" in line)
    assert desk.type(f"gymnasium-bridge replay runs/{corrected} --verify")
    page.click("#replays")
    page.wait_for_selector(f"[data-episode='{corrected}']")
    page.click(f"[data-episode='{corrected}']")
    says(page, "#badge", "replay")
    shows(page, "() => document.getElementById('canvas').dataset.pictures > 3")


def test_an_operator_loses_a_server_and_adds_one(desk: Desk) -> None:
    listed = desk.folder / "urls.txt"
    metrics = free_port()
    # "Starting before the servers": the trainer waits for them.
    code = block("docs/cluster.md", "wait_for_server=600")
    code = replaced(code, {"file:///shared/urls.txt": listed.as_uri(), "num_envs=256": "num_envs=6"})
    code += (
        "import json, os\n"
        "envs.reset(seed=0)\n"
        "while not os.path.exists('enough'):\n    envs.step(envs.action_space.sample())\n"
        "print(json.dumps(envs.report()))\nenvs.close()\n"
    )
    trainer = desk.open(desk.write("train.py", code))
    urls, servers = [], []
    for number in range(3):
        extra = f" --metrics-port {metrics}" if number == 0 else ""
        servers.append(desk.open(f"gymnasium-bridge serve CartPole-v1 --port {free_port()}{extra}"))
    urls = [server.url("grpc") for server in servers]
    listed.write_text("\n".join(urls) + "\n", encoding="utf-8")

    (top,) = [line for line in lines_of(block("docs/cluster.md", "gymnasium-bridge top")) if "--json" in line]
    top = replaced(top, {"file:///home/me/urls.txt": listed.as_uri()}) + " --count 1"

    def slots() -> dict[str, int]:
        """Return the slots of each server, as `top` shows them."""
        return {row["url"]: row.get("slots_used") or 0 for row in json.loads(desk.type(top))["servers"]}

    until(lambda: sorted(slots().values()) == [2, 2, 2], DEADLINE)
    servers[1].process.kill()
    servers.append(desk.open(f"gymnasium-bridge serve CartPole-v1 --port {free_port()}"))
    urls.append(servers[-1].url("grpc"))
    listed.write_text("\n".join(urls) + "\n", encoding="utf-8")

    def moved() -> bool:
        assert trainer.process.poll() is None, trainer.printed
        found = slots()
        return found[urls[1]] == 0 and found[urls[3]] > 0 and sum(found.values()) == 6

    until(moved, DEADLINE)

    with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=DEADLINE) as answer:
        shown = answer.read().decode()
    assert "](reference.md#metrics)" in (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `(bridge_\w+)", page, re.MULTILINE)
    assert len(names) > 15
    assert [name for name in names if f"# TYPE {name} " not in shown] == []

    # "Draining": SIGTERM loses nothing.
    desk.type(f"gymnasium-bridge health {urls[2]}")
    servers[2].process.send_signal(signal.SIGTERM)
    assert servers[2].process.wait(DEADLINE) == 0, servers[2].printed
    until(lambda: sum(slots().values()) == 6, DEADLINE)
    (desk.folder / "enough").touch()
    assert trainer.process.wait(DEADLINE) == 0, trainer.printed
    report = json.loads(trainer.printed.splitlines()[-1])
    assert report["slots/running"] + report["slots/resetting"] == 6
    assert report["losses"] >= 2  # of the server that was killed
