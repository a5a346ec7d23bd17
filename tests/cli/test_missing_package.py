"""`serve` of an environment whose package is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preloaded import run

_SERVE = "import sys; sys.modules['Box2D'] = None; from bridge.cli import main; sys.exit(main(sys.argv[1:]))"
_OWN = (
    "import gymnasium\n\n\nclass NeedsMore(gymnasium.Env):\n    def __init__(self):\n"
    "        raise gymnasium.error.DependencyNotInstalled('xyz is not installed, run `pip install xyz`')\n"
)


@pytest.mark.parametrize(
    ("env", "missing"), [("LunarLander-v3", "Box2D is not installed"), ("own:NeedsMore", "xyz is")]
)
@pytest.mark.parametrize("debug", [False, True])
def test_a_package_that_an_environment_lacks_is_one_line_unless_for_debug(
    env: str, missing: str, debug: bool, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(_OWN)
    done = run("-c", _SERVE, "serve", env, "--port", "0", *["--debug"] * debug, cwd=tmp_path, bare=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("gymnasium-bridge: ")
    assert missing in last
    assert "pip install" in last
    assert ("Traceback" in done.stderr) is debug
    assert debug or done.stderr.count("\n") == 1
