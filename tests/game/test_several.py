"""A game of several agents, which join and leave while it runs."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from gymnasium import spaces

from bridge import Recording, make_parallel_remote, make_remote, serve_game
from bridge.errors import ClosedError, Code, RefusedError, RemoteError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.recording.episodes import load_episode
from bridge.recording.reader import read_folder
from tests.game.loops import ACTION, OBSERVATION, in_thread
from tests.peers import Stream
from tests.support import until

SPACES = {"red": (OBSERVATION, ACTION), "blue": (OBSERVATION, ACTION)}


class Duel:
    """Each agent walks by itself; blue's round ends after `blue` frames, red's after `red`."""

    def __init__(self, game, wait, red, blue):
        self.game, self.wait, self.lengths = game, wait, {"red": red, "blue": blue}
        self.taken, self.begun, self.over = [], [], threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        position, frame, actions, alive = dict.fromkeys(SPACES, 0), 0, {}, set(SPACES)
        try:
            while not self.over.is_set():
                seen = {name: np.array([frame, position[name]], np.float32) for name in SPACES if name in alive}
                ends = {name: frame >= self.lengths[name] for name in alive}
                rewards = {name: float(actions.get(name, 0)) for name in alive}
                actions = self.game.exchange(seen, rewards, terminated=ends, wait=self.wait)
                if self.game.begins:
                    self.begun.append(self.game.seed)
                    position, frame, actions, alive = dict.fromkeys(SPACES, 0), 0, {}, set(SPACES)
                    continue
                self.taken.append(actions)
                alive -= {name for name, end in ends.items() if end}
                position = {name: position[name] + int(actions.get(name, 0)) for name in SPACES}
                frame += 1
                if not self.wait:
                    self.over.wait(0.003)
        except ClosedError:
            pass


@contextmanager
def duel(wait, red=10**6, blue=10**6, **keywords):
    with serve_game(SPACES, **keywords) as game:
        made = Duel(game, wait, red, blue)
        made.thread.start()
        try:
            yield made
        finally:
            made.over.set()
            game.close()
            made.thread.join(20)


def test_agents_join_by_name_and_leave_while_it_runs(process):
    with duel(False, process=process, default_action={"blue": 4}) as game:
        red = make_remote(game.game.url, agent="red")
        red.reset(seed=1)
        red.step(2)
        until(lambda: {"red": 2, "blue": 4} in game.taken)
        blue = make_remote(game.game.url, agent="blue")
        blue.reset()
        blue.step(3)
        until(lambda: {"red": 2, "blue": 3} in game.taken)
        with pytest.raises(RefusedError) as refused:
            make_remote(game.game.url, agent="blue")
        assert refused.value.code == Code.RESOURCE_EXHAUSTED
        assert "create another" not in str(refused.value), "a game is there once"
        red.close()
        until(lambda: game.taken[-1] == {"red": 0, "blue": 3})
        blue.close()


def test_a_reset_counts_once_the_other_agents_have_ended_or_sent_one_too(process):
    with duel(False, process=process) as game:
        red, blue = (make_remote(game.game.url, agent=name, timeout=60) for name in SPACES)
        red.reset(seed=1)
        blue.reset()
        rounds = len(game.begun)
        thread = threading.Thread(target=lambda: red.reset(seed=2))
        thread.start()
        for _ in range(20):
            blue.step(1)
        assert len(game.begun) == rounds, "blue plays on"
        blue.reset()
        thread.join(20)
        assert game.begun[rounds:] == [2]
        red.close()
        blue.close()


def test_an_agent_that_has_ended_gets_no_actions_until_the_round_is_over(process):
    with duel(False, process=process, red=30, blue=10) as game:
        until(lambda: len(game.begun) > 1)
        assert {"red": 0} in game.taken
        assert {"red": 0, "blue": 0} in game.taken


@pytest.mark.parametrize("wait", [False, True])
def test_each_is_told_its_own_rewards_and_its_own_end(process, wait):
    with duel(wait, process=process, red=8, blue=4, timeout=60) as game:
        red, blue = (make_remote(game.game.url, agent=name, timeout=60) for name in SPACES)
        sums = {}

        def play(name, env, action):
            ended = False
            while not ended:
                env.reset(seed=5 if name == "red" else None)
                total, truncated = 0.0, False
                while not (ended or truncated):
                    seen, reward, ended, truncated, _ = env.step(action)
                    total += reward
                assert not (truncated and wait), "in real time a reader may fall rounds behind, and is told so"
            sums[name] = (total, float(seen[1]), float(seen[0]))

        threads = [threading.Thread(target=play, args=of) for of in (("red", red, 1), ("blue", blue, 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for name, length in (("red", 8), ("blue", 4)):
            total, position, frame = sums[name]
            assert frame == length
            if wait:
                assert total == position
        # Where blue was first, red has entered that round, and its seed is for the next one.
        until(lambda: 5 in game.begun)
        red.close()
        blue.close()


def test_a_policy_plays_whom_no_client_plays(process):
    with duel(False, process=process, agents={"blue": lambda seen: 3}) as game:
        red = make_remote(game.game.url, agent="red")
        red.reset()
        red.step(1)
        until(lambda: {"red": 1, "blue": 3} in game.taken)
        red.close()


def raises(seen):
    raise ValueError("this policy is broken")


@pytest.mark.parametrize(("policy", "told"), [(raises, "this policy is broken"), (lambda seen: 77, "77 is not in")])
def test_a_policy_that_fails_is_told_in_the_log_and_the_default_action_stands_in(policy, told, tmp_path, caplog):
    with duel(False, agents={"blue": policy}, default_action={"blue": 4}, record=tmp_path) as game:
        red = make_remote(game.game.url, agent="red")
        red.reset(seed=1)
        red.step(1)
        until(lambda: {"red": 1, "blue": 4} in game.taken and told in caplog.text)
        assert red.step(1)[4]["frames"] >= 0
        red.close()
    assert "the policy of 'blue' has failed" in caplog.text
    assert {actions.get("blue") for actions in game.taken} == {4}
    (stream,) = {episode.stream.number: episode.stream for episode in read_folder(tmp_path).episodes()}.values()
    every = np.arange(len(stream.column("call")))
    assert {name for name in stream.players(every) if name} == {"default", "agent"}


def test_a_slow_policy_is_asked_about_the_newest_observation():
    """Else each of its answers would be later than the one before, and so would all that agents are told."""
    asked, calls = [], threading.Semaphore(0)

    def policy(seen):
        asked.append(float(seen[0]))
        goal = calls_of(game) + 30
        until(lambda: calls_of(game) >= goal or game.over.is_set())
        asked.append(calls_of(game))
        calls.release()
        return 3

    def calls_of(game):
        return len(game.taken)

    with duel(False, agents={"blue": policy}) as game:
        watcher = make_remote(game.game.url + "?world=", agent="red", role="spectator")
        watcher.reset()  # enters the one round: an observation is the number of its frame
        for _ in range(4):
            assert calls.acquire(timeout=30)
        watcher.close()
    newest = [(asked[at], asked[at - 1]) for at in range(2, 8, 2)]
    assert all(seen >= before - 1 for seen, before in newest), newest


@pytest.mark.parametrize(
    ("observation", "passed"),
    [
        ({"green": np.zeros(2)}, {}),
        (np.zeros(2), {}),
        ({"red": np.zeros(2)}, {"reward": {"green": 1.0}}),
        ({"red": np.zeros(2)}, {"terminated": {"green": True}}),
        ({"red": np.zeros(2)}, {"info": {"green": {}}}),
        ({"red": np.zeros(3)}, {}),
    ],
)
def test_an_unknown_name_is_refused_where_it_is_passed(observation, passed):
    with serve_game(SPACES) as game, pytest.raises(SettingError):
        game.exchange(observation, **passed)


def test_an_agent_ends_once_in_a_round():
    with serve_game(SPACES) as game:
        both = {name: np.zeros(2) for name in SPACES}
        game.exchange(both)
        assert game.begins
        game.exchange(both)
        game.exchange(both, terminated={"red": True})
        with pytest.raises(SettingError, match="red is over already"):
            game.exchange(both, terminated={"red": True})
        assert game.exchange(both, truncated={"blue": True}) is None


@pytest.mark.parametrize("wait", [False, True])
def test_an_agent_and_a_person_who_reset_at_once_play_one_round_together(process, wait):
    with duel(wait, process=process, timeout=60) as game:
        envs = {name: make_remote(game.game.url, agent=name, timeout=60) for name in SPACES}
        for turn in range(6):
            together, seen = threading.Barrier(2), {}

            def reset(name, seed, together=together, seen=seen):
                together.wait(10)
                seen[name] = envs[name].reset(seed=seed)[0]

            asked = {"red": 10 + turn, "blue": 20 + turn}
            threads = [threading.Thread(target=reset, args=each) for each in asked.items()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert set(seen) == set(asked), "both have begun"
            assert game.begun[-1] in asked.values()
            rounds = len(game.begun)
            step = [threading.Thread(target=envs[name].step, args=(1,)) for name in asked]
            for thread in step:
                thread.start()
            for thread in step:
                thread.join(30)
            assert len(game.begun) == rounds, "no other round was left to begin"
        for env in envs.values():
            env.close()


@pytest.mark.parametrize("wait", [False, True])
def test_an_agent_that_joins_before_the_first_frame_of_a_round_plays_it_from_there(process, wait):
    begins, goes, over = threading.Event(), threading.Event(), threading.Event()
    taken, frames = [], [0]

    def loop(game):
        """Stand between `begins` and the first frame, until somebody has joined."""
        actions, position = None, dict.fromkeys(SPACES, 0.0)
        while not over.is_set():
            seen = {name: np.array([frames[0], position[name]], np.float32) for name in SPACES}
            try:
                actions = game.exchange(seen, wait=wait)
            except ClosedError:
                return
            if game.begins:
                begins.set()
                goes.wait(20)
                frames[0], position = 0, dict.fromkeys(SPACES, 0.0)
                continue
            taken.append(actions)
            position = {name: position[name] + int(action) for name, action in actions.items()}
            frames[0] += 1
            over.wait(0.0 if wait else 0.003)

    with serve_game(SPACES, process=process, timeout=20, standstill=20.0) as game:
        thread = threading.Thread(target=loop, args=(game,))
        thread.start()
        try:
            red = make_remote(game.url, agent="red", timeout=60)
            told = {}
            asking = threading.Thread(target=lambda: told.update(red=red.reset(seed=4)[0]))
            asking.start()
            assert begins.wait(20)
            blue = make_remote(game.url, agent="blue", timeout=60)
            joining = threading.Thread(target=lambda: told.update(blue=blue.reset()[0]))
            joining.start()
            goes.set()
            asking.join(20)
            joining.join(20)
            assert told["red"][1] == told["blue"][1] == 0, "nobody has acted in this round yet"
            assert told["red"][0] == 0 or not wait, "in real time the game may be a frame further"
            acting = [threading.Thread(target=env.step, args=(action,)) for env, action in ((red, 1), (blue, 2))]
            for each in acting:
                each.start()
            for each in acting:
                each.join(20)
            until(lambda: {"red": 1, "blue": 2} in taken)
            red.close()
            blue.close()
        finally:
            over.set()
            goes.set()
            game.close()
            thread.join(20)


@pytest.mark.parametrize("wait", [False, True])
def test_a_game_that_is_closed_breaks_off_the_episodes_of_those_alone_who_still_play(process, wait, tmp_path):
    steps = {name: [] for name in SPACES}
    with duel(wait, process=process, record=Recording(tmp_path, observations=True)) as game:

        def play(name):
            env = make_remote(game.game.url, agent=name, timeout=60)
            try:
                env.reset(seed=5)
                while not steps[name] or not any(steps[name][-1][2:4]):
                    steps[name].append(env.step(1))
            except RemoteError:  # it was closed while no step was under way
                pass
            env.close()

        threads = [threading.Thread(target=play, args=(name,)) for name in SPACES]
        for thread in threads:
            thread.start()
        until(lambda: all(len(of) > 3 for of in steps.values()))
        game.lengths["blue"] = 0  # both play: it ends in the next frame
        until(lambda: steps["blue"][-1][2])
        game.game.close()
        for thread in threads:
            thread.join(20)
    episode = read_folder(tmp_path).episodes()[-1]
    assert episode.end in ("truncated", "closed")
    assert episode.rewards.shape == (episode.length, 2)
    ends = [load_episode(episode, agent=name).terminations.tolist() for name in ("red", "blue")]
    assert not any(ends[0])
    assert ends[1] == [False] * (len(ends[1]) - 1) + [True], "blue had ended before"
    rows_of_blue = episode.stream.column("lane")[episode.own] == 1
    assert rows_of_blue.sum() == 1 + len(ends[1]), "a beginning and its steps"


THREE = ("red", "blue", "green")
SEEN = spaces.Dict(
    place=spaces.Box(-99, 99, (2,), np.float32),
    kind=spaces.Discrete(3),
    deep=spaces.Dict(pixels=spaces.Box(0, 255, (2, 3), np.uint8), name=spaces.Text(5)),
)
DONE = spaces.Dict(move=spaces.Box(-1, 1, (2,), np.float32), fire=spaces.MultiBinary(2))


@contextmanager
def three(wait, lengths, **keywords):
    """Serve a game of three agents, whose rounds have so many frames by name; give it, and the seeds of its rounds."""
    over, begun = threading.Event(), []

    def loop():
        frame, alive = 0, list(THREE)
        with suppress(ClosedError):
            while not over.is_set():
                pixels = np.full((2, 3), frame % 256, np.uint8)
                seen = {"place": [frame, 1], "kind": np.int8(2), "deep": {"pixels": pixels, "name": "ab"}}
                ends = {name: np.bool_(frame >= lengths[name]) for name in alive}
                game.exchange(
                    dict.fromkeys(alive, seen),
                    dict.fromkeys(alive, np.float16(0.5)),
                    terminated=ends,
                    info={name: {"who": name} for name in alive},
                    wait=wait,
                )
                if game.begins:
                    begun.append(game.seed)
                    frame, alive = 0, list(THREE)
                    continue
                alive = [name for name in alive if not ends[name]]
                frame += 1
                if not wait:
                    over.wait(0.005)

    with serve_game(dict.fromkeys(THREE, (SEEN, DONE)), timeout=20, **keywords) as game, in_thread(loop):
        try:
            yield game, begun
        finally:
            over.set()
            game.close()


@pytest.mark.parametrize("wait", [False, True])
def test_three_agents_of_dict_spaces_of_whom_two_end_at_once_are_each_told_their_own(process, wait):
    lengths = {"red": 5, "blue": 5, "green": 8}
    with three(wait, lengths, process=process) as (game, begun):
        envs = {name: make_remote(game.url, agent=name, timeout=60) for name in THREE}
        told = {name: [] for name in THREE}

        def play(name):
            env = envs[name]
            while len(told[name]) < 3:
                env.reset(seed=7 if name == "red" else None)
                total, ended, truncated = 0.0, False, False
                while not (ended or truncated):
                    seen, reward, ended, truncated, info = env.step(env.action_space.sample())
                    assert info["who"] == name
                    total += reward
                if truncated:
                    assert not wait, "in real time a reader may fall rounds behind, and is told so"
                    continue
                told[name].append((total, int(seen["place"][0]), int(seen["deep"]["pixels"][0, 0]), int(seen["kind"])))

        with (
            in_thread(lambda: play("red")),
            in_thread(lambda: play("blue")),
            in_thread(lambda: play("green")),
        ):
            pass
        assert 7 in begun
        for name, length in lengths.items():
            # In real time an agent may enter a round that runs, whose frames before that are not its own.
            assert [each[1:] for each in told[name]] == [(length, length, 2)] * 3
            assert [each[0] for each in told[name]] == [length / 2] * 3 or not wait
        for env in envs.values():
            env.close()


@pytest.mark.parametrize("wait", [False, True])
def test_a_reset_counts_also_where_some_of_the_others_have_ended_and_the_rest_have_left(process, wait):
    lengths = dict.fromkeys(THREE, 10**6)
    with three(wait, lengths, process=process) as (game, begun):
        envs = {name: make_remote(game.url, agent=name, timeout=60) for name in THREE}
        ended = dict.fromkeys(THREE, False)

        def step(name):
            ended[name] = ended[name] or envs[name].step(DONE.sample())[2]
            return ended[name]

        def play(name):
            envs[name].reset(seed=1 if name == "red" else None)
            for _ in range(2):
                step(name)

        with (
            in_thread(lambda: play("red")),
            in_thread(lambda: play("blue")),
            in_thread(lambda: play("green")),
        ):
            pass
        lengths["blue"] = 0  # all play: it ends in the next frame
        # Blue ends, green leaves in the midst of the round, and then red alone decides.
        with in_thread(lambda: until(lambda: step("blue"))):
            for _ in range(4):
                other = threading.Thread(target=step, args=("green",))
                other.start()
                step("red")
                other.join(20)
        envs["green"].close()
        if wait:  # where the program waits, so does the next round for all who are in
            envs["blue"].close()
        lengths["blue"] = 10**6  # else it ends as the next round begins
        seen, _ = envs["red"].reset(seed=2)
        assert begun[-1] == 2
        assert seen["place"][0] == 0 or not wait
        envs["red"].close()
        envs["blue"].close()


def test_one_client_may_play_all_agents(process):
    with three(True, dict.fromkeys(THREE, 6), process=process) as (game, begun):
        env = make_parallel_remote(game.url + "?world=")
        for seed in (3, 4):
            env.reset(seed=seed)
            frames = 0
            while env.agents:
                _, rewards, _, _, infos = env.step({name: DONE.sample() for name in env.agents})
                assert rewards == dict.fromkeys(THREE, 0.5)
                assert {name: info["who"] for name, info in infos.items()} == {name: name for name in THREE}
                frames += 1
            assert frames == 6
        env.close()
        assert begun == [3, 4]


@pytest.mark.parametrize("red", [1, 5])
def test_who_has_ended_first_waits_for_the_next_round_while_the_one_at_hand_goes_on_without_players(process, red):
    with duel(False, red=red, blue=40, process=process) as made:
        stream = Stream(made.game.server).join(agent="red")
        stream.ask(reset=pb.ResetRequest())
        answers = [stream.ask(step=pb.StepRequest())]
        until(lambda: len(made.begun) >= 2)  # at first, and for the Reset
        began = len(made.begun)
        while len(made.begun) < began + 2:  # two rounds, of which it asks for none
            answers.append(stream.ask(step=pb.StepRequest()))
        stream.close()
        assert [answer.WhichOneof("payload") for answer in answers] == ["step"] * len(answers)
