"""The protocol page says what the code does."""

import dataclasses
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bridge
from bridge.core.server.session_states import TRANSITIONS, SessionEvent, SessionState
from bridge.testing import CountingEnv
from tests.places import ROOT

PAGE = ROOT / "docs" / "protocol.md"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_parts_are_current(generate):
    for name in generate.PARTS:
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert generate.generate(name, page) == page, "run python docs/generate.py"


def test_the_drawings_are_current():
    command = [sys.executable, str(ROOT / "docs" / "drawings.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_end_of_a_stream_closes_from_everywhere():
    assert all((state, SessionEvent.END) in TRANSITIONS for state in SessionState if state is not SessionState.CLOSED)


def test_a_page_without_a_mark_is_an_error(generate):
    with pytest.raises(ValueError, match="'extensions'"):
        generate.generate("protocol.md", "nothing")


@pytest.mark.slow
def test_the_check_tells_a_stale_page(generate, tmp_path, monkeypatch):
    pytest.importorskip("griffe")
    monkeypatch.syspath_prepend(ROOT / "docs")  # as of a script in that folder
    for page in PAGE.parent.glob("*.md"):
        shutil.copy(page, tmp_path)
    stale = tmp_path / "protocol.md"
    stale.write_text(PAGE.read_text(encoding="utf-8").replace("| JoinWorld |", "| Join |"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    with pytest.raises(SystemExit, match="not current"):
        generate.main(tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    generate.main(tmp_path)
    assert stale.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_the_keywords_that_the_page_names_are_keywords():
    page = PAGE.read_text(encoding="utf-8")
    known = {field.name for field in dataclasses.fields(bridge.Limits)}
    for function in (bridge.serve_gym, bridge.serve_parallel):
        known |= set(inspect.signature(function).parameters)
    for name in ("max_worlds", "idle_timeout", "reset_world_timeout", "agent_timeout", "missing_agent", "time_action"):
        assert name in known
        assert name in page


def test_a_client_of_grpc_and_the_proto_alone_plays(tmp_path):
    """D-4, D-9: the page's own commands, in a process that never imports this package."""
    protoc = shutil.which("protoc", path=str(Path(sys.executable).parent)) or shutil.which("protoc")
    assert protoc, "protoc was not found: install the extra `test`"
    for folder, name in (("docs", "plain_client.py"), ("proto/bridge/pb", "dm_env_rpc.proto")):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(ROOT / folder / name, tmp_path / folder)
    generation, play = re.findall(r"^((?:protoc|python docs/).*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run([protoc, *generation.split()[1:]], cwd=tmp_path, check=True)
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "bridge.py").write_text("raise ImportError('a client of its own')")
    _, script, _ = play.split()
    with bridge.serve_gym(lambda: CountingEnv(4)) as server:
        done = subprocess.run(
            [sys.executable, script, server.url.removeprefix("grpc://"), "2"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "guard")},
            check=True,
            timeout=60,
            capture_output=True,
            text=True,
        )
    assert done.stdout.splitlines() == [
        "episode 0: 4 steps, return 10, TERMINATED",
        "episode 1: 4 steps, return 10, TERMINATED",
    ]
