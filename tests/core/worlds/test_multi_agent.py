"""Worlds of several agents, over real connections (D-22, D-5)."""

import copy
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings

import gymnasium
import numpy as np
import pettingzoo
import pytest

import bridge
from bridge.errors import (
    Code,
    ConnectionLostError,
    InvalidActionError,
    RefusedError,
    ResetNeededError,
    SettingError,
)
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import check_server
from tests.parallel_envs import NAMES, Relay
from tests.peers import PublicClient, Stream
from tests.places import ROOT
from tests.preloaded import run
from tests.support import assert_identical, everywhere, until

RUNNING, TERMINATED, INTERRUPTED = 1, 2, 3

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PettingZoo's own tests import what it deprecates
    from pettingzoo.test import parallel_api_test


def play(env, seed, episodes=3):
    """Everything that an environment returns over some episodes of seeded actions."""
    rng = np.random.default_rng(seed)
    spaces = {agent: env.action_space(agent) for agent in env.possible_agents}
    for agent, space in spaces.items():
        space.seed(int(rng.integers(1 << 30)) + len(agent))
    seen = []
    for episode in range(episodes):
        seen.append(env.reset(seed=seed if episode == 0 else None, options={"time": episode}))
        while env.agents:
            actions = {agent: spaces[agent].sample() for agent in env.agents}
            seen.append((list(env.agents), *env.step(actions)))
    return seen


@pytest.fixture
def remote(isolation):
    """Make servers and remotes, and close them."""
    made = []

    def make(env, *, kwargs=None, **options):
        server = bridge.serve_parallel(env, isolation=isolation, **options)
        made.append(server.stop)
        env = bridge.make_parallel_remote(server.url, timeout=20, **(kwargs or {}))
        made.append(env.close)
        return env

    yield make
    for close in reversed(made):
        close()


@everywhere
def test_a_remote_world_gives_what_the_local_one_gives(remote):
    """D-22: observations, rewards, both flags and infos of each agent, to the bit, over agents that end early."""
    local = Relay(distances=(3, 8, 100))
    far = remote(Relay, kwargs={"env_kwargs": {"distances": [3, 8, 100]}})
    for agent in NAMES:
        assert far.observation_space(agent) == local.observation_space(agent)
        assert far.action_space(agent) == local.action_space(agent)
    assert_identical(play(far, 7), play(local, 7))


@pytest.mark.parametrize("policy", ["wait", "default", "end"])
def test_the_remote_environment_passes_pettingzoos_own_test(remote, policy):
    """D-22: `parallel_api_test`, under every policy for a missing agent."""
    far = remote(lambda: Relay(distances=(5, 9, 30), horizon=12), missing_agent=policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(far, num_cycles=40)


def test_an_aec_environment_is_served_through_pettingzoos_conversion(remote):
    """D-22: rock paper scissors, which PettingZoo turns into a parallel one."""
    far = remote(
        lambda **kwargs: pettingzoo.make("aec", "classic/rps-v2", **kwargs), kwargs={"env_kwargs": {"max_cycles": 5}}
    )
    local = pettingzoo.make("parallel", "classic/rps-v2", max_cycles=5)
    observed = play(far, 3, episodes=2)
    assert len(observed) == 12
    for mine, theirs in zip(observed, play(local, 3, episodes=2), strict=True):
        assert len(mine) == len(theirs)
        if len(mine) == 6:
            assert mine[2] == {agent: float(reward) for agent, reward in theirs[2].items()}
            assert mine[4] == theirs[4]


@everywhere
def test_a_turn_based_environment_is_served_with_its_action_masks(remote):
    """D-22: tic-tac-toe, turn by turn; the masks of the observations say what is allowed."""
    far = remote("classic/tictactoe-v3")
    observations, infos = far.reset(seed=1)
    turns = 0
    active = "player_1"
    while far.agents:
        actions = {
            agent: far.action_space(agent).sample(np.asarray(observations[agent]["action_mask"], np.int8))
            if agent == active
            else far.action_space(agent).sample()
            for agent in far.agents
        }
        observations, rewards, terminated, _, infos = far.step(actions)
        active = infos[next(iter(infos))].get("active_agent")
        turns += 1
    assert 5 <= turns <= 9
    assert all(terminated.values())
    assert sum(rewards.values()) == 0


def test_pistonball_plays_like_the_local_one(remote):
    """D-22: a zoo environment by its id, with images."""
    settings = {"n_pistons": 3, "max_cycles": 6}
    far = remote("butterfly/pistonball-v6", kwargs={"env_kwargs": settings})
    local = pettingzoo.make("parallel", "butterfly/pistonball-v6", **settings)
    for mine, theirs in zip(play(far, 5, 1), play(local, 5, 1), strict=True):
        if len(mine) == 6:
            assert mine[0] == theirs[0]
        for agent, image in theirs[len(theirs) == 6].items():
            np.testing.assert_array_equal(mine[len(mine) == 6][agent], image)
    local.close()


def test_the_environment_is_reset_once_an_episode_and_by_the_seed_that_is_given(remote):
    """D-14, D-22: three agents reset, the environment once."""
    env = Relay()
    far = remote(env)
    far.reset(seed=5)
    far.reset()
    far.reset(seed=6, options={"time": 2})
    assert env.seeds == [5, None, 6]
    assert env.time == 2


@everywhere
def test_rendering_state_and_calls_reach_the_environment(remote):
    """D-18, D-22: the properties of a world of several agents."""
    far = remote(Relay, kwargs={"render_mode": "rgb_array"})
    far.reset()
    assert far.render_mode == "rgb_array"
    assert far.render().shape == (2, 2, 3)
    assert_identical(far.state(), np.zeros(3, np.int64))
    assert far.call("horizon") == 8
    with pytest.raises(RefusedError, match="no method or attribute 'nothing'"):
        far.call("nothing")
    assert far.metadata["name"] == "relay_v0"


def test_a_step_without_an_agents_action_is_refused_before_it_is_sent(remote):
    far = remote(Relay)
    with pytest.raises(ResetNeededError):
        far.step({})
    far.reset()
    with pytest.raises(InvalidActionError, match=r"none for \['bob', 'cyd'\]"):
        far.step({"ann": 0})
    with pytest.raises(InvalidActionError):
        far.step({**{agent: far.action_space(agent).sample() for agent in NAMES}, "ann": 3})
    far.step({agent: far.action_space(agent).sample() for agent in NAMES})


@everywhere
def test_an_error_of_the_environment_reaches_the_caller_and_the_game_goes_on(remote):
    """D-2, D-22: the failed joint step is a no-op for all, whose refusals are of that step alone."""
    far, local = remote(lambda: Relay(fail_at=1)), Relay(fail_at=1)
    far.reset(seed=3)
    local.reset(seed=3)
    actions = {agent: far.action_space(agent).sample() for agent in NAMES}
    assert_identical(far.step(actions), local.step(actions))
    with pytest.raises(bridge.errors.EnvironmentFailedError, match="a shoe came off"):
        far.step(actions)
    with pytest.raises(RuntimeError, match="a shoe came off"):
        local.step(actions)
    for _ in range(3):
        assert_identical(far.step(actions), local.step(actions))
    observations, _ = far.reset()
    assert list(observations) == list(NAMES)


def test_a_world_without_agents_is_named_as_such():
    with bridge.serve_gym("CartPole-v1") as server, pytest.raises(SettingError, match="use make_remote"):
        bridge.make_parallel_remote(server.url)


def test_an_agent_that_the_environment_names_twice_is_rewarded_once(remote):
    class Doubled(Relay):
        def reset(self, seed=None, options=None):
            result = super().reset(seed, options)
            self.agents *= 2
            return result

    far = remote(Doubled)
    far.reset(seed=1)
    for _ in range(2):
        _, rewards, *_ = far.step({agent: far.action_space(agent).sample() for agent in NAMES})
        assert rewards["bob"] == pytest.approx(rewards["ann"] + 0.1)


def test_an_environment_without_agents_is_refused_in_words():
    class Deserted(Relay):
        def __init__(self):
            super().__init__()
            self.possible_agents = []

    with (
        bridge.serve_parallel(Deserted) as server,
        pytest.raises(RefusedError, match="got one without any in its possible_agents"),
    ):
        bridge.make_parallel_remote(server.url)


def test_one_environment_gives_one_world():
    """D-3: the server says why there is no second one."""
    env = Relay()
    with bridge.serve_parallel(env) as server:
        first = bridge.make_parallel_remote(server.url)
        with pytest.raises(RefusedError, match="one environment"):
            bridge.make_parallel_remote(server.url)
        first.close()
    assert env.closed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing_agent": "panic"}, "wait, default, end"),
        ({"agent_timeout": 0}, "agent_timeout"),
        ({"default_action": 3}, "default_action"),
        ({"limits": {"idle_timeout": 1.0}}, r"expected limits to be bridge.Limits\(…\), got a dict"),
    ],
)
def test_bad_keywords_are_refused(options, message):
    with pytest.raises(SettingError, match=message):
        bridge.serve_parallel(Relay, **options)


def test_what_is_no_environment_is_refused():
    for wrong, message in ((7, "expected an id"), (np, "expected an id"), ("relay", "has no environment 'relay'")):
        with pytest.raises(SettingError, match=message):
            bridge.serve_parallel(wrong)
    with bridge.serve_parallel(lambda: 7) as server, pytest.raises(RefusedError, match="ParallelEnv"):
        bridge.make_parallel_remote(server.url)


def test_an_id_without_pettingzoo_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(SettingError, match=r"pip install -e '\.\[pettingzoo\]'"):
        bridge.serve_parallel("butterfly/pistonball-v6")


def test_bridge_imports_without_pettingzoo():
    """The extra is an extra: only asking for the remote parallel environment needs it, and says how to get it."""
    code = """
        import sys
        sys.modules["pettingzoo"] = None
        import bridge
        bridge.serve_parallel
        try:
            bridge.make_parallel_remote
        except ImportError as error:
            assert "pip install -e '.[pettingzoo]'" in str(error), error
        else:
            raise SystemExit("it imported")
    """
    done = run("-c", textwrap.dedent(code), bare=True)
    assert done.returncode == 0, done.stderr


class Seat(threading.Thread):
    """Plays one agent by a RemoteEnv in a thread, until told to stop or the episode ends."""

    def __init__(self, url, agent=None, stop_after=None):
        super().__init__()
        self.env = bridge.make_remote(url, agent=agent, timeout=20)
        self.stop_after, self.seen, self.error = stop_after, [], None

    def run(self):
        try:
            self.env.reset()
            while self.stop_after is None or len(self.seen) < self.stop_after:
                self.seen.append(self.env.step(self.env.action_space.sample()))
                if self.seen[-1][2] or self.seen[-1][3]:
                    break
        except bridge.errors.BridgeError as error:
            self.error = error


def together(*seats):
    for seat in seats:
        seat.start()
    for seat in seats:
        seat.join(30)
        assert not seat.is_alive()


def test_connections_join_as_the_agents_they_name_or_the_first_that_is_free():
    """D-6, D-22: each its own specs; a taken, an unknown and a third agent too many are errors."""
    with bridge.serve_parallel(Relay) as server:
        url = server.url + "?world="
        bob = bridge.make_remote(url, agent="bob")
        ann = bridge.make_remote(url)
        assert isinstance(bob.observation_space, gymnasium.spaces.Dict)
        assert ann.action_space == gymnasium.spaces.Discrete(3)
        with pytest.raises(RefusedError, match="'bob' is taken; there are still cyd"):
            bridge.make_remote(url, agent="bob")
        with pytest.raises(RefusedError, match="one of ann, bob, cyd") as refused:
            bridge.make_remote(url, agent="dan")
        assert refused.value.code == Code.INVALID_ARGUMENT
        cyd = bridge.make_remote(url)
        with pytest.raises(RefusedError, match="full") as refused:
            bridge.make_remote(url)
        assert refused.value.code == Code.RESOURCE_EXHAUSTED
        for env in (ann, bob, cyd):
            env.close()


def test_under_wait_a_missing_agent_is_waited_for_up_to_the_deadline():
    """D-22, policy wait: the Step is refused naming who is missing; sent again, it goes on once all are there."""
    with bridge.serve_parallel(Relay, agent_timeout=0.3) as server:
        url = server.url + "?world="
        ann = bridge.make_remote(url, agent="ann")
        with pytest.raises(RefusedError, match="bob, cyd") as refused:
            ann.reset()
        assert refused.value.code == Code.DEADLINE_EXCEEDED
        ann.close()
    with bridge.serve_parallel(Relay, agent_timeout=20) as server:
        url = server.url + "?world="
        seats = [Seat(url) for _ in NAMES]
        together(*seats)
        assert [len(seat.seen) for seat in seats] == [8, 8, 8]
        for seat in seats:
            seat.env.close()


def test_under_wait_another_client_takes_over_a_seat_in_the_running_sequence():
    """D-22, policy wait: the simulation is blocked until another agent joins; its first Step enters the sequence."""
    env = Relay()
    with bridge.serve_parallel(env, agent_timeout=20) as server:
        url = server.url + "?world="
        leaver = Seat(url, "ann", stop_after=3)
        others = [Seat(url, "bob"), Seat(url, "cyd")]
        for seat in (leaver, *others):
            seat.start()
        leaver.join(30)
        leaver.env.close()
        heir = Seat(url, "ann")
        heir.start()
        for seat in (*others, heir):
            seat.join(30)
        assert [len(seat.seen) for seat in others] == [8, 8]
        assert len(heir.seen) == 5
        assert env.resets == 1
        for seat in (*others, heir):
            seat.env.close()


def test_under_default_the_game_goes_on_without_the_one_who_leaves():
    """D-22, policy default: a default action stands in at once, and one of the server's own where it gives any."""
    env = Relay()
    with bridge.serve_parallel(
        env,
        missing_agent="default",
        default_action=lambda agent, seen, space: {
            "ann": 2,
            "bob": {"run": 3, "lean": np.zeros(2, np.float32)},
            "cyd": np.full(1, 5, np.float32),
        }[agent],
    ) as server:
        url = server.url + "?world="
        alone = Seat(url, "ann")
        together(alone)
        assert len(alone.seen) == 8
        assert all(entry["bob"] == 3 and entry["cyd"] == 5 for entry in env.log)
        alone.env.close()


def test_under_default_a_late_agent_is_played_for_and_gets_the_rewards_it_missed():
    """D-22, policy default: past the deadline the others go on; what the late one missed adds up. D-13: the end too."""
    env = Relay(horizon=4)
    with bridge.serve_parallel(env, missing_agent="default", agent_timeout=0.3) as server:
        url = server.url + "?world="
        ann, bob = (bridge.make_remote(url, agent=name) for name in ("ann", "bob"))
        starts = [threading.Thread(target=env.reset) for env in (ann, bob)]
        for thread in starts:
            thread.start()
        for thread in starts:
            thread.join(20)
        rewards = [ann.step(np.int64(1))[1] for _ in range(4)]
        assert len(env.log) == 4
        _, reward, terminated, truncated, _ = bob.step(bob.action_space.sample())
        assert reward == pytest.approx(sum(rewards) + 4 * 0.1)
        assert (terminated, truncated) == (False, True)
        ann.close()
        bob.close()


class Reusing(Relay):
    """Gives `ann` the same array in each step, and writes into it also once her episode has ended."""

    seen = np.zeros(4, np.float32)

    def step(self, actions):
        observations, *rest = super().step(actions)
        self.seen[:] = *self.ran.values(), self.time
        return {agent: self.seen if agent == "ann" else seen for agent, seen in observations.items()}, *rest


def test_under_default_a_late_agent_is_told_what_its_episode_ended_with():
    """D-22, policy default, although the environment has gone on since then, and reuses its arrays."""
    fast = {"ann": 2, "bob": {"run": 0, "lean": np.zeros(2, np.float32)}, "cyd": np.zeros(1, np.float32)}
    with bridge.serve_parallel(
        Reusing(distances=(2, 100, 100)),
        missing_agent="default",
        agent_timeout=0.3,
        default_action=lambda agent, observation, space: fast[agent],
    ) as server:
        ann, bob = (bridge.make_remote(server.url + "?world=", agent=name) for name in ("ann", "bob"))
        starts = [threading.Thread(target=env.reset) for env in (ann, bob)]
        for thread in starts:
            thread.start()
        for thread in starts:
            thread.join(20)
        for _ in range(3):
            bob.step(fast["bob"])
        observation, _, terminated, _, _ = ann.step(np.int64(1))
        assert terminated
        assert observation.tolist() == [2, 0, 0, 1]
        ann.close()
        bob.close()


def test_under_end_the_sequence_ends_for_all_when_one_leaves():
    """D-22, policy end: the others get their observations once with INTERRUPTED."""
    with bridge.serve_parallel(lambda: Relay(horizon=10_000), missing_agent="end") as server:
        url = server.url + "?world="
        leaver = Seat(url, "ann", stop_after=3)
        others = [Seat(url, "bob"), Seat(url, "cyd")]
        for seat in (leaver, *others):
            seat.start()
        leaver.join(30)
        leaver.env.close()
        for seat in others:
            seat.join(30)
            assert seat.error is None
            observation, reward, terminated, truncated, _ = seat.seen[-1]
            assert (terminated, truncated) == (False, True)
            assert seat.env.observation_space.contains(observation)
            assert reward == 0.0
            assert 3 <= len(seat.seen) <= 5
            seat.env.close()


def test_worlds_do_not_touch_each_other():
    """D-5: two games on one server, one of them ended and its world destroyed, the other goes on as if alone."""
    with bridge.serve_parallel(Relay) as server:
        one, two = (bridge.make_parallel_remote(server.url) for _ in range(2))
        assert_identical(one.reset(seed=1), Relay().reset(seed=1))
        two.reset(seed=2)
        local = Relay()
        local.reset(seed=2)
        for count in range(8):
            actions = {agent: two.action_space(agent).sample() for agent in NAMES}
            assert_identical(two.step(actions), local.step(actions))
            if count == 3:
                one.close()
        two.close()
        assert server.worlds == []


KILLED = """
    import sys
    from tests.parallel_envs import Relay
    from tests.peers import PublicClient, Stream

    class Server:
        url = sys.argv[1]

    client = PublicClient(Server).join(agent="cyd")
    print("joined", flush=True)
    client.step()
    for _ in range(3):
        client.step(action=[2.0])
    print("played", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("policy", ["default", "end"])
def test_when_one_of_two_public_clients_is_killed_the_others_go_on_as_declared(policy):
    """D-22, D-2: two public clients and one of ours in one world; one public client's process is killed."""
    env = Relay(horizon=40, distances=(1000, 1000, 1000))
    with bridge.serve_parallel(env, missing_agent=policy, agent_timeout=20) as server:
        ours = bridge.make_remote(server.url + "?world=", agent="ann", timeout=30)
        public = PublicClient(server).join(agent="bob")
        code = textwrap.dedent(KILLED)
        process = subprocess.Popen(
            [sys.executable, "-c", code, server.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            seen, states = [], []

            def play_ours():
                ours.reset()
                while not seen or not (seen[-1][2] or seen[-1][3]):
                    seen.append(ours.step(1))

            def play_public():
                states.append(public.step("reward")[0])
                while len(states) == 1 or states[-1] == RUNNING:
                    states.append(public.step("reward", action__run=3, action__lean=[0.0, 0.0])[0])

            assert process.stdout.readline().strip() == b"joined"
            players = [threading.Thread(target=play_ours), threading.Thread(target=play_public)]
            for thread in players:
                thread.start()
            assert process.stdout.readline().strip() == b"played"
            process.kill()
            for thread in players:
                thread.join(60)
                assert not thread.is_alive()
        finally:
            process.kill()
            process.wait(20)
            process.stdin.close()
            process.stdout.close()
        assert env.log[2] == {"ann": 1, "bob": 3, "cyd": 2}
        assert states[-1] == INTERRUPTED
        if policy == "default":
            assert len(seen) == len(states) - 1 == 40
            assert env.log[-1] == {"ann": 1, "bob": 3, "cyd": 0}
        else:
            assert len(seen) < 40
            assert seen[-1][3]
        public.close()
        ours.close()


def waiting(server):
    """Wait until somebody waits in its first Step."""
    until(lambda: "" in server.worlds and server.status()["requests"] == 1, 20)


def test_a_client_that_dies_while_it_waits_for_others_frees_its_seat_at_once():
    """D-22, D-16: long before `agent_timeout`; another takes the seat."""
    with bridge.serve_parallel(Relay, agent_timeout=600) as server:
        stream = Stream(server).join()
        stream.send(step=pb.StepRequest())
        waiting(server)
        stream.die()
        until(lambda: server.status()["slots"] == 0, 20)
        stream.close()


def test_destroying_a_world_ends_the_waits_in_it():
    """D-17, D-22: who waits for others hears it now, not at the deadline."""
    with bridge.serve_parallel(Relay, agent_timeout=600) as server:
        stream, killer = Stream(server).join(), Stream(server)
        stream.send(step=pb.StepRequest())
        waiting(server)
        killer.ask(destroy_world=pb.DestroyWorldRequest())
        error = stream.take().error
        assert error.code == Code.FAILED_PRECONDITION
        assert "destroyed" in error.message
        stream.close()
        killer.close()


def test_a_server_stops_while_agents_wait():
    """The fixture of all tests sees to it that no thread stays; a warning would fail this test."""
    server = bridge.serve_parallel(Relay, agent_timeout=600)
    stream = Stream(server).join()
    stream.send(step=pb.StepRequest())
    waiting(server)
    server.stop()
    stream.close()
    assert server.worlds == []


@everywhere
def test_there_is_no_frame_before_the_first_sequence(remote):
    """D-18."""
    far = remote(Relay, kwargs={"render_mode": "rgb_array"})
    with pytest.raises(RefusedError, match="no sequence has begun"):
        far.render()


def test_a_world_of_several_agents_passes_the_conformance_checks():
    """D-15, D-16, D-17, D-22: by the checks that anyone can run."""
    with bridge.serve_parallel(Relay, missing_agent="default", agent_timeout=20) as server:
        report = check_server(server.url, only=["D-15", "D-16", "D-17", "D-22"], required_actions=["action"])
    assert report.ok, str(report)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
def test_a_copy_joins_a_world_of_its_own_in_its_first_reset(remote, copied):
    env = remote(Relay)
    env.reset(seed=1)
    actions = {agent: env.action_space(agent).sample() for agent in env.agents}
    env.step(actions)
    other = copied(env)
    try:
        assert other.possible_agents == env.possible_agents
        assert other.observation_space("ann") == env.observation_space("ann")
        assert other.agents == []
        with pytest.raises(ResetNeededError):
            other.step({})
        assert_identical(play(other, 3), play(Relay(), 3))
        assert env.agents == list(NAMES)  # its episode goes on
        env.step(actions)
    finally:
        other.close()


def test_a_joint_step_that_is_too_large_for_one_agent_leaves_all_as_they_are():
    text, large = gymnasium.spaces.Text(20_000), "x" * 15_000

    class Talk(Relay):
        def action_space(self, agent):
            return text

        def _speed(self, agent, action):
            return len(action)

    with bridge.serve_parallel(Talk) as server:
        env = bridge.make_parallel_remote(server.url, max_message_bytes=10_000, timeout=20.0)
        env.reset()
        actions = dict.fromkeys(env.agents, "x")
        for call in (lambda: env.step({**actions, env.agents[-1]: large}), lambda: env.reset(options={"text": large})):
            with pytest.raises(SettingError, match="larger than max_message_bytes=10000"):
                call()
        for time in (1, 2):
            assert env.step(actions)[0]["ann"][-1] == time
        env.close()


def test_after_a_loss_that_a_question_meets_a_step_asks_for_a_reset_which_connects_again():
    with bridge.serve_parallel(Relay) as server:
        env = bridge.make_parallel_remote(server.url, timeout=20.0)
        env.reset()
        actions = {agent: env.action_space(agent).sample() for agent in env.agents}
        env.step(actions)
    with pytest.raises(ConnectionLostError):
        env.render()
    with pytest.raises(ResetNeededError):
        env.step(actions)
    with bridge.serve_parallel(Relay, port=server.port):
        assert list(env.reset()[0]) == list(NAMES)
        env.step(actions)
        env.close()


def test_several_players_of_the_default_world_are_one_world():
    # D-3
    with bridge.serve_parallel(Relay, limits=bridge.Limits(max_worlds=1)) as server:
        players = [Stream(server).join() for _ in NAMES]
        reader = Stream(server)
        refused = reader.ask(create_world=pb.CreateWorldRequest())
        assert refused.error.code == Code.RESOURCE_EXHAUSTED
        assert "max_worlds=1" in refused.error.message
        for stream in [*players, reader]:
            stream.close()


class Rewound(Relay):
    """Can be put back."""

    def rewind(self, to):
        self.ran, self.time, self.agents = dict.fromkeys(NAMES, to), to, ["bob", "cyd"]
        return {agent: self._see(agent) for agent in self.agents}


class Rewind(bridge.MessagePart):
    """Puts the runners back to where they started, or where a message says; `ann` is out of it then."""

    def answer(self, request):
        (relay,) = self.stage.envs
        if request:
            seen = relay.rewind(int(request))
            self.stage.place(0, seen, {agent: {"back": True} for agent in relay.agents})
        return b"done"


REWIND = bridge.SessionMessage(bridge.MessageForm("rewind", "tests.Rewind", "tests.Rewound", places=True), part=Rewind)


@everywhere
def test_a_message_puts_all_agents_of_a_client_into_another_situation(remote):
    far = remote(Rewound, messages=[REWIND])
    far.reset(seed=0)
    reply = far.send_message(REWIND.form, b"")
    assert reply.answers[0].data == b"done"
    assert reply.began is None
    spaces = {agent: far.action_space(agent) for agent in NAMES}
    far.step({agent: space.sample() for agent, space in spaces.items()})
    for where in (3, 5):
        observations, infos = far.send_message(REWIND.form, str(where).encode()).began
        assert far.agents == list(observations) == ["bob", "cyd"]
        assert observations["bob"]["place"] == where
        assert observations["cyd"] == f"at {where} after {where}"
        assert infos["bob"] == {"back": True}
        seen, *_ = far.step({agent: spaces[agent].sample() for agent in far.agents})
        assert seen["cyd"].endswith(f"after {where + 1}")
        assert list(seen) == ["bob", "cyd"]
    # The next episode is of all again.
    far.reset()
    assert far.agents == list(NAMES)


def test_a_message_that_may_place_is_refused_while_a_step_of_another_agent_waits():
    auth = bridge.Auth(shared_control=True)
    with bridge.serve_parallel(Rewound, missing_agent="end", messages=[REWIND], auth=auth) as server:
        envs = [bridge.make_remote(f"{server.url}?world=", agent=agent, timeout=20) for agent in NAMES]
        began = [threading.Thread(target=env.reset) for env in envs]
        for thread in began:
            thread.start()
        for thread in began:
            thread.join(20)
        steps = [threading.Thread(target=env.step, args=(env.action_space.sample(),)) for env in envs]
        steps[0].start()

        def is_refused():
            try:
                envs[1].send_message(REWIND.form, b"")
            except RefusedError as error:
                return error.code == Code.FAILED_PRECONDITION and "Steps of agents of this world are" in str(error)
            return False

        until(is_refused)
        for thread in steps[1:]:
            thread.start()
        for thread in steps:
            thread.join(20)
        # One of three clients rewinds all: the others hear of the end by their next Steps, and may go on from there.
        assert envs[1].send_message(REWIND.form, b"4").answers[0].placed
        assert envs[2].step(envs[2].action_space.sample())[3]
        observation, _ = envs[2].reset()
        assert observation == "at 4 after 4"
        for env in envs:
            env.close()
