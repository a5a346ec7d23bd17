"""What an error says where an extra is not installed: one error, which names the remedy, and no other one before it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest

from bridge.core.extras import imported_from, install_command, needed, says_what_to_install
from bridge.errors import SettingError
from tests.preloaded import run

HIDDEN = "import sys\nsys.modules.update(dict.fromkeys({}))\n"
"""As where packages are not installed."""


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        (["pyarrow"], "import bridge; bridge.serve_gym('CartPole-v1', record='runs')", "record"),
        (["pyarrow"], "import bridge; bridge.Recorder", "record"),
        (["pyarrow"], "from bridge.recording.replay import verify", "record"),
        (["pyarrow"], "from bridge.recording.lerobot import export_lerobot", "record"),
        (["websockets"], "import bridge; bridge.serve_gym('CartPole-v1', web=True)", "web"),
        (["websockets"], "import bridge; bridge.make_remote('ws://127.0.0.1:1')", "web"),
        (["websockets"], "import bridge; bridge.make_remote('openenv://127.0.0.1:1')", "web"),
        (["websockets", "msgpack"], "from bridge.policies import serve_policy", "policy"),
        (["prometheus_client"], "import bridge; bridge.serve_gym('CartPole-v1', metrics_port=0)", "ops"),
        (["pettingzoo"], "import bridge; bridge.RemoteParallelEnv", "pettingzoo"),
        (["ray"], "from bridge.fleet.ray import launch", "ray"),
        (["stable_baselines3"], "from bridge.wrappers import SB3VecEnv", "sb3"),
        (["cryptography"], "from bridge.testing import make_certificates; make_certificates('certs', ['a'])", "cert"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else None,
)
def test_a_program_that_lacks_an_extra_shows_one_error(
    packages: list[str], code: str, said: str, tmp_path: Path
) -> None:
    done = run("-c", HIDDEN.format(packages) + code, cwd=tmp_path, bare=True)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert install_command(said) in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("way", [needed, imported_from])
def test_an_extra_that_is_named_deep_inside_is_named_alone(way) -> None:
    inner = imported_from("recordings need pyarrow", "record")
    with pytest.raises((SettingError, ImportError)) as caught, way("this needs more", "demo"), inner:
        import nothing_of_this_name  # type: ignore[import-not-found]  # noqa: F401
    assert str(caught.value) == f"recordings need pyarrow: {install_command('record')}"
    assert shown(caught.value).count("Traceback") == 1


@pytest.mark.parametrize("way", [needed, imported_from])
def test_a_package_that_is_there_and_broken_is_told_with_its_own_error(way, tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises((SettingError, ImportError)) as caught, way("films need PyAV", "film"):
        import broken_package  # type: ignore[import-not-found]  # noqa: F401
    assert str(caught.value).startswith(f"films need PyAV: {install_command('film')}; what is installed cannot be")
    assert "libGL.so.1" in str(caught.value)
    assert shown(caught.value).count("Traceback") == 2, "the cause tells where"
    sys.modules.pop("broken_package", None)


def test_other_import_errors_are_no_remedy() -> None:
    assert not says_what_to_install(ImportError("something"))
    assert not says_what_to_install(ModuleNotFoundError("no module", name="gymnasium"))
