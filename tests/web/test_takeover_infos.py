"""While somebody else acts, the infos hold what the environment executed, bit for bit, for every kind of space."""

from __future__ import annotations

import copy
import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from bridge import make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.core.encoding.tensors import pack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, Proxy
from bridge.wrappers import BlockingReset
from tests.peers import Stream
from tests.support import assert_identical, everywhere, layout_of, until
from tests.web_envs import Paddle, Paddles

SPACES = {
    "Discrete": spaces.Discrete(5, start=-2),
    "Box": spaces.Box(-1, 1, (2, 3), np.float32),
    "Box of uint8": spaces.Box(0, 255, (4,), np.uint8),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(3),
    "Text": spaces.Text(5),
    "Dict": spaces.Dict(arm=spaces.Box(-1, 1, (2,), np.float64), grip=spaces.Discrete(2)),
    "Tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float32))),
    "Sequence": spaces.Sequence(spaces.Box(0, 1, (2,), np.float32)),
    "OneOf": spaces.OneOf((spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float32))),
    "Graph": spaces.Graph(spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(3)),
}


class Program(Stream):
    """A program that takes over: a client with `role=takeover`."""

    def sit(self, space, **settings):
        self.layout = layout_of(space, "action")
        self.join("", role="takeover", **settings)
        self.ask(step=pb.StepRequest())
        return self

    def hold(self, action):
        packed = [] if action is None else self.layout.pack(action)
        actions = {uid: pack_tensor(array) for uid, array in enumerate(packed, start=1)}
        answer = self.ask(step=pb.StepRequest(actions=actions))
        assert answer.WhichOneof("payload") == "step", answer


@pytest.fixture
def program():
    made = []

    def make(server, space, **settings):
        stream = Program(server, own_connection=True)
        made.append(stream)
        return stream.sit(space, **settings)

    yield make
    for stream in made:
        stream.die()
        stream.channel.close()


def plain(value):
    """A graph as its parts: infos hold the plain type of a tuple."""
    return tuple(value) if isinstance(value, spaces.GraphInstance) else value


def different(space):
    """Two actions that differ."""
    space.seed(1)
    first = other = space.sample()
    while repr(other) == repr(first):
        other = space.sample()
    return first, other


class Noting(CountingEnv):
    """Notes what `step` received, and then changes it where it can: the infos must not follow."""

    def __init__(self, space, seen):
        super().__init__(1000, action_space=space)
        self.seen = seen

    def step(self, action):
        self.seen.append(copy.deepcopy(action))
        if isinstance(action, np.ndarray):
            action[...] = 0
        return super().step(action)


@pytest.mark.parametrize("name", SPACES)
def test_the_executed_action_of_every_space_is_told_bit_for_bit(program, name):
    space, seen = SPACES[name], []
    with serve_gym(lambda: Noting(space, seen)) as server:
        env = make_remote(f"{server.url}?world=")
        env.reset(seed=0)
        own, other = different(space)
        one = program(server, space, name="pilot")
        assert "intervene_action" not in env.step(own)[4]
        one.hold(other)
        for _ in range(2):  # the same action is used again, whatever the environment did with it
            info = env.step(own)[4]
            assert (info["intervention"], info["intervened_by"]) == (True, "pilot")
            assert_identical(info["intervene_action"], plain(seen[-1]))
            assert_identical(plain(seen[-1]), plain(other))
        one.hold(None)
        assert env.step(own)[4] == {}
        env.close()


@pytest.mark.parametrize("name", ["Discrete", "Box", "MultiDiscrete", "Dict", "Tuple", "Text"])
@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "worlds"])
def test_in_vectors_the_executed_actions_are_a_batch_with_a_mask(program, name, lanes):
    space, seen = SPACES[name], []
    with serve_gym(lambda: Noting(space, seen), num_envs=3 if lanes else 1) as server:
        url = f"{server.url}?world=" if lanes else [f"{server.url}?world=", server.url, server.url]
        envs = BlockingReset(make_vec_remote(url))
        envs.reset(seed=0)
        own, other = different(space)
        batch = gymnasium.vector.utils.concatenate(
            space, [own] * 3, gymnasium.vector.utils.create_empty_array(space, 3)
        )
        one = program(server, space, **({"lane": 1} if lanes else {}))
        one.hold(other)
        *_, infos = envs.step(batch)
        slot = 1 if lanes else 0
        assert infos["_intervene_action"].tolist() == [index == slot for index in range(3)]
        rows = list(gymnasium.vector.utils.iterate(envs.action_space, infos["intervene_action"]))
        assert_identical(rows[slot], other)
        if isinstance(envs.action_space, spaces.Box):
            assert infos["intervene_action"].dtype == envs.action_space.dtype
        assert any(repr(action) == repr(other) for action in seen)
        envs.close()


def test_infos_that_do_not_fit_into_arrays_are_told_of_an_intervention_too(program):
    class Odd(Paddle):
        count = 0

        def __init__(self):
            super().__init__()
            Odd.count += 1
            self.value = 1 if Odd.count % 2 else "text"

        def step(self, action):
            *rest, _ = super().step(action)
            return (*rest, {"mixed": self.value})

    with serve_gym(Odd, num_envs=2) as server:
        envs = BlockingReset(make_vec_remote(f"{server.url}?world="))
        envs.reset(seed=0)
        program(server, Paddle().action_space, lane=1).hold(-1)
        *_, infos = envs.step(np.ones(2, np.int64))
        assert infos["_intervene_action"].tolist() == [False, True]
        assert infos["intervene_action"][1] == -1
        envs.close()


def test_a_lane_that_resets_executes_no_action(program):
    with serve_gym(lambda: CountingEnv(2), num_envs=2) as server:
        envs = BlockingReset(make_vec_remote(f"{server.url}?world="))
        envs.reset(seed=0)
        space = envs.single_action_space
        one = program(server, space, lane=0)
        told = []
        for _ in range(3):
            one.hold(space.sample())
            *_, ended, truncated, infos = envs.step(envs.action_space.sample())
            told.append(("intervene_action" in infos, bool((ended | truncated)[0])))
        assert told == [(True, False), (True, True), (False, False)]
        envs.close()


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_the_last_action_of_an_episode_is_told_in_each_autoreset_mode(program, mode):
    modes = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
    with serve_gym(lambda: CountingEnv(1)) as server:
        envs = BlockingReset(make_vec_remote([f"{server.url}?world=", server.url]), autoreset_mode=modes[mode])
        envs.reset(seed=0)
        space = envs.single_action_space
        one = program(server, space)
        action = space.sample()
        one.hold(action)
        *_, infos = envs.step(envs.action_space.sample())
        found = infos if mode == "next_step" else infos["final_info"]
        assert found["_intervene_action"].tolist() == [True, False]
        assert_identical(found["intervene_action"][0], np.asarray(action)[()])
        assert mode == "next_step" or "intervene_action" not in infos
        envs.close()


@everywhere
def test_one_of_several_agents_is_told_in_lock_step(program, isolation):
    with serve_parallel(Paddles, isolation=isolation) as server:
        env = make_parallel_remote(f"{server.url}?world=")
        env.reset(seed=0)
        one = program(server, env.action_space("upper"), agent="upper")
        one.hold(-1)
        infos = env.step(dict.fromkeys(env.agents, 1))[4]
        assert infos["upper"]["intervene_action"] == -1
        assert all("intervene_action" not in info for agent, info in infos.items() if agent != "upper")
        env.close()


class Held:
    """Repeats an action until the block ends, as a person who holds a key."""

    def __init__(self, stream, action):
        self._stream, self._action, self._over = stream, action, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._over.is_set():
            self._stream.hold(self._action)
            self._over.wait(0.1)

    def __enter__(self):
        self._stream.hold(self._action)
        self._thread.start()

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize("wait", ["now", "next_frame"])
@pytest.mark.parametrize("lanes", [None, 3], ids=["one", "lanes"])
def test_in_real_time_the_frames_in_which_somebody_acted_are_counted(program, wait, lanes):
    """Each frame is told once: with its reward, and with who acted in it."""
    with serve_gym(Paddle, fps=50, num_envs=lanes or 1) as server:
        envs = BlockingReset(make_vec_remote(f"{server.url}?world=", wait=wait))
        envs.reset(seed=0)
        one = program(server, envs.single_action_space, **({"lane": 0} if lanes else {}))
        counts = []

        def stepped(wanted):
            infos = envs.step(np.ones(envs.num_envs, np.int64))[-1]
            frames = int(infos["frames"][0])
            acted = int(infos["intervened_frames"][0]) if "intervened_frames" in infos else 0
            assert acted <= frames
            assert ("intervene_action" in infos) == ("intervened_frames" in infos) == (acted > 0)
            if acted:
                assert infos["_intervene_action"].tolist() == [index == 0 for index in range(envs.num_envs)]
                assert infos["intervene_action"][0] == -1
                assert infos["intervened_by"][0] == "somebody"
            counts.append((acted, frames))
            return wanted(acted, frames)

        with Held(one, -1):
            until(lambda: stepped(lambda acted, frames: acted > 0))
            until(lambda: stepped(lambda acted, frames: acted == frames > 0))
        one.hold(None)
        until(lambda: stepped(lambda acted, frames: acted == 0 < frames))
        envs.close()


class Scored(gymnasium.Env):
    """Gives 1.0 for each frame in which the person's action, 1, is executed; an episode has 23 frames."""

    observation_space = spaces.Box(0, 100, (1,), np.int64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.frame = np.zeros(1, np.int64)
        return self.frame, {}

    def step(self, action):
        self.frame = self.frame + 1
        return self.frame, float(action == 1), bool(self.frame[0] == 23), False, {"frame": int(self.frame[0])}


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [None, 2], ids=["one", "lanes"])
@pytest.mark.parametrize("delay", [0.0, 0.04], ids=["near", "far"])
def test_each_frame_of_a_person_is_told_once_with_its_reward(program, delay, lanes):
    """Far away Steps are in flight, and the client merges frames that no step told."""
    with serve_gym(Scored, fps=60, num_envs=lanes or 1) as server, Proxy(server.port) as proxy:
        proxy.delay = delay
        envs = BlockingReset(make_vec_remote(f"grpc://127.0.0.1:{proxy.port}?world="))
        envs.reset(seed=0)
        slot, told = envs.num_envs - 1, []
        one = program(server, Scored.action_space, **({"lane": slot} if lanes else {}))

        def stepped(wanted):
            threading.Event().wait(0.05 * (len(told) % 3))  # several frames pass in some steps
            _, rewards, *_, infos = envs.step(np.zeros(envs.num_envs, np.int64))
            acted = infos.get("intervened_frames", np.zeros(envs.num_envs, np.int64))
            assert rewards.tolist() == acted.tolist()
            assert ("_intervene_action" in infos) == acted.any()
            told.append(int(acted[slot]))
            return wanted()

        with Held(one, 1):
            until(lambda: stepped(lambda: sum(told) > 50 and max(told) > 1))
        one.hold(None)
        until(lambda: stepped(lambda: told[-5:] == [0] * 5))
        envs.close()


def test_frames_between_two_observations_are_told_even_if_the_last_one_was_the_agent_s_own(program):
    """The agent does not step while a person acts and gives back."""
    with serve_gym(Paddle, fps=50) as server:
        env = make_remote(f"{server.url}?world=", wait="now")
        watcher = make_remote(f"{server.url}?world=", role="spectator", wait="next_frame")
        env.reset(seed=0)
        watcher.reset()
        one = program(server, env.action_space, name="Eve")
        one.hold(-1)
        until(lambda: one.hold(-1) or "intervene_action" in watcher.step(0)[4])
        one.hold(None)
        until(lambda: (info := watcher.step(0)[4])["frames"] > 0 and "intervene_action" not in info)
        told = []

        def acted():
            told.append(env.step(1)[4])
            return "intervene_action" in told[-1]

        until(acted)
        info = told[-1]
        assert info["intervene_action"] == -1
        assert info["intervened_by"] == "Eve"
        assert 0 < info["intervened_frames"] <= info["frames"]
        watcher.close()
        env.close()


def test_several_agents_in_real_time_are_told(program):
    with serve_parallel(Paddles, fps=50) as server:
        env = make_parallel_remote(f"{server.url}?world=", wait="next_frame")
        env.reset(seed=0)
        one = program(server, env.action_space("upper"), agent="upper")
        with Held(one, -1):
            seen = []

            def acted():
                seen.append(env.step(dict.fromkeys(env.agents, 1))[4])
                return "intervene_action" in seen[-1]["upper"]

            until(acted)
        assert seen[-1]["upper"]["intervene_action"] == -1
        assert seen[-1]["upper"]["intervened_frames"] >= 1
        assert "intervene_action" not in seen[-1]["lower"]
        env.close()
