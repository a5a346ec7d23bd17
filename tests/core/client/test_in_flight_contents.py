"""Steps in flight: observations of every kind, infos and notes, where an answer is put together from several."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge.core.encoding.tensors import pack_tensor
from tests.far_network import FarNetwork
from tests.realtime_tools import read_batch
from tests.support import lane_info

LANES = 3


class Rich(gymnasium.Env[Any, Any]):
    """Observations and infos of many kinds, each of which says the episode and the frame."""

    observation_space = spaces.Dict(
        {
            "where": spaces.Box(-1e9, 1e9, (2,), np.float64),
            "frame": spaces.Discrete(10**6),
            "text": spaces.Text(20, charset="0123456789-"),
            "items": spaces.Sequence(spaces.Discrete(10**6)),
        }
    )
    action_space = spaces.Discrete(10)

    def __init__(self, length: int, mixed: bool) -> None:
        self.length, self.mixed = length, mixed
        self.episode = self.frame = 0

    def told(self) -> Any:
        info: dict[str, Any] = {"where": np.array([self.episode, self.frame]), "nested": {"frame": self.frame}}
        if self.frame % 2:
            info["odd"] = float(self.frame) if self.mixed and self.frame % 3 else self.frame
        observation = {
            "where": np.array([self.episode, self.frame], np.float64),
            "frame": np.int64(self.frame),
            "text": f"{self.episode}-{self.frame}",
            "items": (self.frame,) * (self.frame % 4),
        }
        return observation, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.frame = self.episode + 1, 0
        return self.told()

    def step(self, action: Any) -> Any:
        self.frame += 1
        observation, info = self.told()
        return observation, 1.0, self.frame >= self.length, False, info


class Noting(Rich):
    """Its observation's numbers are Python's own; if `mixed`, its third frame has an info that does not travel."""

    observation_space = spaces.Dict({"frame": spaces.Discrete(10**6)})

    def told(self) -> Any:
        info = {"frame": self.frame, **({"bad": object()} if self.mixed and self.frame == 3 else {})}
        return {"frame": self.frame}, info


Make = Callable[..., FarNetwork]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[FarNetwork] = []

    def make(env: Callable[[], Any], **more: Any) -> FarNetwork:
        made.append(FarNetwork(monkeypatch, lambda now: env(), **more))
        return made[-1]

    yield make
    for item in made:
        item.close()


def told(net: FarNetwork, remote: Any) -> Any:
    net.take()
    net.run_until(lambda: bool(net.answers))
    return net.answers.pop(0).message  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_an_answer_put_together_from_several_holds_each_lane_s_observation_and_info(network: Make, mixed: bool) -> None:
    lengths = itertools.cycle((7, 16, 29))
    net = network(lambda: Rich(next(lengths), mixed), num_envs=LANES)
    remote = net.remote()
    remote.session.wait_for_all()
    remote.begin({})
    message, frames = told(net, remote), set()
    for number in range(80):
        rows, _, info = read_batch(remote, message)
        for lane, row in enumerate(rows):
            episode, frame = row["where"].astype(int).tolist()
            assert (row["frame"], row["text"], row["items"]) == (frame, f"{episode}-{frame}", (frame,) * (frame % 4))
            own = lane_info(info, lane)
            assert own["where"].tolist() == [episode, frame]
            assert own["nested"] == {"frame": frame}
            assert own.get("odd") == (frame if frame % 2 else None)
        frames.add(tuple(row["frame"] for row in rows))
        net.run_for(0.06 * (number % 4))
        remote.send_step(remote.world.writer.write_columns([np.zeros(LANES, np.int64)], 0))
        message = told(net, remote)
    assert len(frames) > 30


def test_what_infos_say_once_is_told_also_where_its_answer_is_left_out(network: Make) -> None:
    net = network(lambda: Noting(10**6, True))
    remote = net.remote()
    remote.begin({})
    assert remote.world.reader.read(told(net, remote), remote.now())[0] == {"frame": 0}
    net.run_for(1.0)
    remote.step(0)
    with pytest.warns(RuntimeWarning, match="bad"):
        observation, *_, info = remote.world.reader.read(told(net, remote), remote.now())
    assert "bad" not in info
    assert info["frame"] == observation["frame"] > 40


def test_the_form_of_observations_is_known_where_the_first_answer_is_left_out(network: Make) -> None:
    net = network(lambda: Noting(10**6, False))
    remote = net.remote()
    remote.begin({})
    net.run_for(0.05)
    remote.begin({"restart": pack_tensor(False)})
    observation = remote.world.reader.read(told(net, remote), remote.now())[0]
    assert type(observation["frame"]) is int
