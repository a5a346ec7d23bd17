"""Streams that look at worlds, and an environment that is drawn in shades of grey."""

from __future__ import annotations

import io
import time

import gymnasium
import numpy as np
from gymnasium import spaces
from PIL import Image

from bridge.core.encoding.names import WATCH
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.peers import Stream


class Painted(gymnasium.Env):
    """Shows how often it was stepped as a shade of grey, and counts how often it is drawn."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - as Gymnasium has it
    observation_space = spaces.Box(0, 10**9, (1,), np.int64)
    action_space = spaces.Discrete(3)
    drawn = 0
    slow = 0.0

    def __init__(self, render_mode=None, length=10**9, size=(200, 300)):
        self.render_mode, self.length, self.size = render_mode, length, size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.array([0]), {}

    def step(self, action):
        self.steps += 1
        return np.array([self.steps]), float(action), self.steps >= self.length, False, {"n": self.steps}

    def render(self):
        type(self).drawn += 1
        time.sleep(self.slow)
        if self.render_mode is None:
            return None
        return np.full((*self.size, 3), self.steps % 256, np.uint8)


class Viewer(Stream):
    """A stream that watches, or plays with pictures."""

    def join(self, world="", **settings):
        super().join(world, **{"frame": "jpeg", "role": "spectator", **settings})
        self.acts = {spec.name: uid for uid, spec in self.specs.actions.items()}
        return self

    def look(self, *names, action=None):
        """Step; return the state and observations by name, `frame` as an array."""
        wanted = names or ("frame", "watch")
        self.wants(*wanted, action=action)
        return self.seen(*wanted)

    def wants(self, *names, action=None):
        actions = {} if action is None else {self.acts["action"]: pack_tensor(np.int64(action))}
        self.send(step=pb.StepRequest(actions=actions, requested_observations=[self.uids[name] for name in names]))

    def seen(self, *names):
        answer = self.take()
        assert answer.WhichOneof("payload") == "step", answer
        found = {name: unpack_tensor(answer.step.observations[self.uids[name]]) for name in names}
        if "frame" in found:
            data = found["frame"].tobytes()
            found["frame"] = np.asarray(Image.open(io.BytesIO(data))) if data else None
        if "watch" in found:
            found["watch"] = dict(zip(WATCH, found["watch"].tolist(), strict=True))
        return answer.step.state, found

    def refused(self, **payload):
        answer = self.ask(**payload)
        assert answer.WhichOneof("payload") == "error", answer
        return answer.error


def shade(frame):
    """The one shade of grey of a picture, as JPEG keeps it."""
    assert frame.std() < 2
    return float(frame.mean())
