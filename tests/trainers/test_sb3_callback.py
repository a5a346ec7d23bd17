"""What failures cost is in the logs of a training with Stable-Baselines3."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecMonitor

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.errors import SettingError
from bridge.wrappers import SB3ReportCallback, SB3VecEnv

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Gymnasium's and Stable-Baselines3's own remarks
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def logged(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the logger's table."""
    with (folder / "progress.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_report_is_logged_after_each_rollout(tmp_path: Path, capsys, wrapped: bool) -> None:
    # Two servers whose names are alike as far as the terminal's table shows them.
    with serve_gym("CartPole-v1") as one, serve_gym("CartPole-v1") as other:
        envs = SB3VecEnv(make_vec_remote([one.url, other.url], num_envs=4, blocking=True))
        model = PPO("MlpPolicy", VecMonitor(envs) if wrapped else envs, n_steps=16, batch_size=16, device="cpu")
        model.set_logger(configure(str(tmp_path), ["csv", "stdout", "log"]))
        model.learn(128, callback=SB3ReportCallback())
        envs.close()
        model.logger.close()
        rows = logged(tmp_path)
        assert len(rows) == 2
        asked = [float(row["bridge/steps_asked"]) for row in rows]
        assert 0 < asked[0] < asked[1]
        for url in (one.url, other.url):
            assert float(rows[-1][f"bridge/servers/{url}/slots"]) == 2.0
    table = capsys.readouterr().out
    assert "slots/running" in table
    assert "servers/" not in table


def test_the_report_counts_a_server_that_was_lost(tmp_path: Path) -> None:
    with serve_gym("CartPole-v1") as one, serve_gym("CartPole-v1") as spare:
        envs = SB3VecEnv(make_vec_remote(one.url, num_envs=2, spares=[spare.url] * 2, blocking=True))
        model = DQN("MlpPolicy", envs, learning_starts=1000, device="cpu")
        model.set_logger(configure(str(tmp_path), ["csv"]))
        model.learn(100, callback=SB3ReportCallback())
        assert model.logger.name_to_value["bridge/losses"] == 0.0
        one.stop()
        model.learn(100, callback=SB3ReportCallback(), reset_num_timesteps=False)
        assert model.logger.name_to_value["bridge/losses"] == envs.report()["losses"] >= 2.0
        envs.close()
        model.logger.close()


def test_other_environments_are_refused_before_the_training() -> None:
    with serve_gym("CartPole-v1") as server, make_remote(server.url) as env:
        model = PPO("MlpPolicy", env, n_steps=16, batch_size=16, device="cpu")
        with pytest.raises(SettingError, match=r"expected a training on SB3VecEnv.*, got one on DummyVecEnv"):
            model.learn(32, callback=SB3ReportCallback())
        assert model.num_timesteps == 0


def test_the_block_of_the_page_writes_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n([^`]*SB3ReportCallback[^`]*)```", page)
    assert "100_000" in code
    monkeypatch.chdir(tmp_path)
    with serve_gym("CartPole-v1") as server:
        envs = VecMonitor(SB3VecEnv(make_vec_remote(server.url, num_envs=8, blocking=True)))
        names = {"PPO": PPO, "envs": envs}
        exec(code.replace("100_000", "20_000"), names)
        envs.close()
        names["model"].logger.close()
    (folder,) = (tmp_path / "runs").iterdir()
    events = accumulators.EventAccumulator(str(folder))
    events.Reload()
    assert [point.value for point in events.Scalars("bridge/losses")] == [0.0, 0.0]
    assert events.Scalars("bridge/steps_asked")[-1].value >= 20_000
