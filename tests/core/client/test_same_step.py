"""Lanes that begin their next episodes within the Step that ended the last ones, for clients that ask for it.

What a client gets then is what it gets by a Reset of the lanes that ended, and a Step: in one answer in place of three.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from bridge import errors, make_vec_remote, serve_gym
from bridge.core.encoding import values
from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.testing import EVERY_SPACE, CountingEnv, Proxy, SpaceEnv
from bridge.web.gateway import serve_gateway
from bridge.wrappers import BlockingReset
from tests.support import assert_identical, direct_registry, direct_session, gym_source, layout_of, sampled

LANES = 4


def of_space(name: str) -> Any:
    return SpaceEnv(EVERY_SPACE[name](), spaces.Discrete(3), min_steps=1, max_steps=4)


# On the wire


class Client:
    """A client of a world of lanes that speaks raw messages."""

    def __init__(self, make: Any, num_envs: int = LANES) -> None:
        registry = direct_registry(gym_source(make, num_envs=num_envs))
        self.session = direct_session(registry, "1.0")  # else there are no infos
        self.specs = self.ask(join_world=pb.JoinWorldRequest()).join_world.specs
        self.uids = {spec.name: uid for uid, spec in self.specs.observations.items()}
        self.wanted = [uid for uid in sorted(self.uids.values()) if uid != self.uids["discount"]]
        signals = {self.uids[name] for name in ("reward", "terminated", "truncated", "info")}
        self.seen = [uid for uid in self.wanted if uid not in signals]
        ((self.action, _),) = self.specs.actions.items()

    def ask(self, **payload: Any) -> pb.EnvironmentResponse:
        parts = self.session.handle(pb.EnvironmentRequest(**payload).SerializeToString())
        return pb.EnvironmentResponse.FromString(parts)

    def step(self, *actions: int) -> pb.EnvironmentResponse:
        sent = {self.action: pack_tensor(np.array(actions))} if actions else {}
        return self.ask(step=pb.StepRequest(requested_observations=self.wanted, actions=sent))

    def reset(self, mask: Any = None, seed: Any = None) -> pb.EnvironmentResponse:
        settings = {} if mask is None else {"reset_mask": pack_tensor(mask)}
        if seed is not None:
            settings["seed"] = pack_tensor(np.array(seed))
        return self.ask(reset=pb.ResetRequest(settings=settings))

    def property(self, key: str, value: str | None = None) -> pb.EnvironmentResponse:
        request = properties_pb2.PropertyRequest()
        if value is None:
            request.read_property.key = key
        else:
            request.write_property.key = key
            request.write_property.value.CopyFrom(pack_tensor(value))
        message = pb.EnvironmentRequest()
        message.extension.type_url, message.extension.value = PROPERTY_REQUEST_URL, request.SerializeToString()
        return pb.EnvironmentResponse.FromString(self.session.handle(message.SerializeToString()))

    def read(self, answer: pb.EnvironmentResponse) -> list[Any]:
        """Every observation of a Step's answer, the info decoded and without the answer that is within it."""
        assert answer.WhichOneof("payload") == "step", answer
        found: list[Any] = [answer.step.state]
        for uid in self.wanted:
            array = unpack_tensor(answer.step.observations[uid])
            told = array if uid != self.uids["info"] else values.decode_step_info(array.tobytes())[:-1]
            found.append([list(part) if type(part).__name__.startswith("Repeated") else part for part in told]
                         if uid == self.uids["info"] else array)  # fmt: skip
        return found

    def begun(self, answer: pb.EnvironmentResponse) -> pb.EnvironmentResponse | None:
        """What a Reset of the lanes that ended, and a Step, would get, by the answer to a Step; None: none ended."""
        begun = self.message(answer)
        if begun is None or begun.code:
            return begun and pb.EnvironmentResponse(error=pb.Status(code=begun.code, message=begun.message))
        whole = pb.EnvironmentResponse.FromString(answer.SerializeToString())
        found = whole.step.observations
        for uid, rows in zip(self.seen, begun.rows, strict=True):
            array, lanes = np.array(unpack_tensor(found[uid])), list(begun.lanes)
            encoded = list(self.specs.observations[uid].shape) == [-1]
            if not encoded and array.dtype.kind in "biuf":
                array[lanes] = np.frombuffer(rows, array.dtype).reshape(len(lanes), *array.shape[1:])
            else:
                items = values.decode(array.tobytes()) if encoded else array.tolist()
                for lane, item in zip(lanes, values.decode(rows), strict=True):
                    items[lane] = item
                array = np.frombuffer(values.encode(items), np.uint8) if encoded else np.array(items, object)
            found[uid].CopyFrom(pack_tensor(array))
        for name in ("reward", "terminated", "truncated"):
            found[self.uids[name]].CopyFrom(pack_tensor(np.zeros_like(unpack_tensor(found[self.uids[name]]))))
        info = begun.info or values.EMPTY_DICT
        found[self.uids["info"]].CopyFrom(pack_tensor(np.frombuffer(info, np.uint8)))
        return whole

    def message(self, answer: pb.EnvironmentResponse) -> Any:
        """What an answer says of lanes that began their next episodes; None: nothing."""
        return values.decode_step_info(answer.step.observations[self.uids["info"]].uint8s.array).begun

    def ended(self, answer: pb.EnvironmentResponse) -> Any:
        flags = (unpack_tensor(answer.step.observations[self.uids[name]]) for name in ("terminated", "truncated"))
        return np.logical_or(*flags)


@pytest.mark.parametrize("name", sampled(EVERY_SPACE, 8, slow=4))
def test_a_step_answers_what_a_reset_of_the_lanes_that_ended_and_a_step_would(name: str) -> None:
    one, two = Client(lambda: of_space(name)), Client(lambda: of_space(name))
    assert one.property("world.autoreset", "same_step").WhichOneof("payload") == "extension"
    for client in (one, two):
        client.reset(seed=[5, 6, 7, 8])
    assert_identical(one.read(one.step()), two.read(two.step()))
    counts = set()
    for number in range(24):
        actions = [(number + lane) % 3 for lane in range(LANES)]
        mine, theirs = one.step(*actions), two.step(*actions)
        assert_identical(one.read(mine), two.read(theirs))
        ended, begun = two.ended(theirs), one.begun(mine)
        counts.add(int(ended.sum()))
        assert (begun is not None) == bool(ended.any())
        if begun is not None:
            assert two.reset(None if ended.all() else ended).WhichOneof("payload") == "reset"
            assert_identical(one.read(begun), two.read(two.step()))
    assert {0, 1, 2} <= counts


@pytest.mark.parametrize("name", sampled(EVERY_SPACE, 4))
def test_rows_of_some_lanes_are_written_over_theirs_alone(name: str) -> None:
    space, chosen = EVERY_SPACE[name](), [0, 2]
    layout = layout_of(space, lanes=LANES)
    space.seed(0)
    before, after = (
        concatenate(space, [space.sample() for _ in range(LANES)], create_empty_array(space, LANES)) for _ in range(2)
    )

    def columns_of(batch: Any) -> list[Any]:
        columns = layout.columns(LANES)
        for index, array in enumerate(layout.pack(batch, rounding=True)):
            layout.write(columns, index, 0, array)
        return [column.copy() for column in columns]

    old, new, columns = columns_of(before), columns_of(after), columns_of(before)
    for index in range(len(layout.leaves)):
        rows = layout.pack_rows(index, after, chosen)
        layout.write_lanes(columns, index, chosen, rows)
        for wrong in (rows[:-1], rows + b"x", b"") if rows else ():
            with pytest.raises(errors.TensorError):
                layout.write_lanes(columns_of(before), index, chosen, wrong)
        if rows:
            with pytest.raises(errors.TensorError):
                layout.write_lanes(columns_of(before), index, [0, 1, 2], rows)
    for lane in range(LANES):
        assert_identical(layout.row(columns, lane), layout.row(new if lane in chosen else old, lane))


def test_who_does_not_ask_for_it_gets_the_beginnings_in_the_next_step() -> None:
    client = Client(lambda: CountingEnv(2))
    assert client.property("world.autoreset", "same_step").WhichOneof("payload") == "extension"
    client.step()
    assert client.begun(client.step(0, 0, 0, 0)) is None
    assert client.begun(client.step(0, 0, 0, 0)) is not None
    assert client.property("world.autoreset", "next_step").WhichOneof("payload") == "extension"
    assert client.begun(client.step(0, 0, 0, 0)) is None
    answer = client.step(0, 0, 0, 0)
    assert client.ended(answer).all()
    assert client.begun(answer) is None
    observations = unpack_tensor(client.step(0, 0, 0, 0).step.observations[1])
    assert observations.tolist() == [[3, 0]] * LANES


def test_a_step_that_asks_for_other_observations_is_answered_these_alone() -> None:
    """Of the others nothing is computed (D-10), so neither is the info, which would hold how the lanes begin."""
    client = Client(lambda: CountingEnv(1))
    client.property("world.autoreset", "same_step")
    client.wanted = [1, client.uids["terminated"]]
    client.step()
    for episode in (1, 2, 3):
        answer = client.step(0, 0, 0, 0)
        assert set(answer.step.observations) == set(client.wanted)
        assert unpack_tensor(answer.step.observations[1]).tolist() == [[episode, 1]] * LANES
        client.step(0, 0, 0, 0)  # in which the next ones begin


def test_the_property_says_how_it_is_and_takes_no_other_word() -> None:
    client = Client(CountingEnv)
    value = properties_pb2.PropertyResponse.FromString(client.property("world.autoreset").extension.value)
    assert str(unpack_tensor(value.read_property.value)[()]) == "next_step"
    refused = client.property("world.autoreset", "sometimes")
    assert refused.error.code == errors.Code.INVALID_ARGUMENT
    assert "expected the setting world.autoreset to be next_step or same_step, got 'sometimes'" in refused.error.message


def test_lanes_that_begin_anew_in_the_same_step_by_themselves_have_no_such_property() -> None:
    client = Client(lambda: SyncVectorEnv([CountingEnv] * LANES, autoreset_mode=AutoresetMode.SAME_STEP), 1)
    assert client.property("world.autoreset", "same_step").error.code == errors.Code.NOT_FOUND


def test_a_beginning_that_fails_in_every_lane_is_told_within_the_answer_to_the_step() -> None:
    class Once(CountingEnv):
        def reset(self, **given: Any) -> Any:
            if self.episode:
                raise RuntimeError("the door is shut")
            return super().reset(**given)

    client = Client(lambda: Once(1))
    client.property("world.autoreset", "same_step")
    client.step()
    answer = client.step(0, 0, 0, 0)
    assert client.ended(answer).all()
    begun = client.begun(answer)
    assert begun is not None
    assert begun.error.code == errors.Code.INTERNAL
    assert "the door is shut" in begun.error.message


# By BlockingReset


class Trouble(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Raises, or returns what is wrong, in certain calls of the environment that is seeded with 7."""

    def __init__(self, kind: str) -> None:
        super().__init__(SpaceEnv(spaces.Box(0.0, 1.0, (3,)), spaces.Discrete(3), min_steps=1, max_steps=4))
        self.kind, self.first, self.calls = kind, None, itertools.count()
        self.resets = 0

    def _fails(self, kind: str, count: int, of: int) -> bool:
        return kind == self.kind and self.first in (7, "all") and next(self.calls) % of >= of - count

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if self.first is None:
            self.first = "all" if self.kind == "every reset" else seed
        # Each second one, which is tried again; four in a row, which is more than there are attempts; or all.
        elif self._fails("reset", 1, of=2) or self._fails("resets", 4, of=9) or self._fails("every reset", 1, of=1):
            raise RuntimeError("the reset failed")
        self.resets += 1
        result = self.env.reset(seed=seed, options=options)
        return (np.full(9, 3.0), {}) if self._fails("wrong reset", 1, of=3) else result

    def step(self, action: Any) -> Any:
        if self._fails("step", 1, of=3):
            raise RuntimeError("the step failed")
        observation, reward, *flags, info = self.env.step(action)
        if self._fails("observation", 1, of=3):
            observation = np.full(9, 3.0)
        return observation, "much" if self._fails("reward", 1, of=3) else reward, *flags, info


def played(envs: Any, steps: int, url: str) -> list[Any]:
    """What a reset and steps give; errors without what a port, or a traceback, makes of them."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, np.ndarray) and value.dtype == object:
            return [plain(item) for item in value]
        return value.replace(url, "URL").partition("\n")[0] if isinstance(value, str) else value

    found: list[Any] = [envs.reset(seed=5)]
    for number in range(steps):
        actions = (np.arange(envs.num_envs) + number) % 3
        try:
            found.append(envs.step(actions))
        except errors.RemoteError as error:
            found.append((type(error), str(error)))
    return [tuple(map(plain, result)) for result in found]


FAILURES = ["none", "step", "observation", "reward", "reset", "resets", "wrong reset", "every reset"]


@pytest.mark.parametrize("kind", sampled(FAILURES, 4, 1, slow=True))
def test_a_step_in_one_trip_gives_what_one_in_two_trips_gives(kind: str) -> None:
    """With `step_timeout` a step has less time than a reset, so that these are asked for apart."""
    found = []
    for apart in ({}, {"step_timeout": 30.0}):
        with serve_gym(lambda: Trouble(kind)) as server:
            envs = make_vec_remote(
                server.url, num_envs=LANES, lanes=True, blocking=True, autoreset_mode="SameStep",
                on_lost="continue", max_failures=None, **apart,
            )  # fmt: skip
            results = played(envs, 3 if kind == "every reset" else 60, server.url)
            cut = envs.report()["episodes_cut"]
            found.append([results, cut, None if kind == "every reset" else envs.get_attr("resets")])
            envs.close()
    assert_identical(*found)
    ends = sum(int((result[2] | result[3]).sum()) for result in found[0][0] if len(result) == 5)
    assert ends > (1 if kind == "every reset" else 30)
    assert bool(found[0][1]) == (kind not in ("none", "reset", "wrong reset"))


def bytes_of_steps(url: str, server_port: int, steps: int, **keywords: Any) -> int:
    """The bytes that some steps take, both ways, in which a lane ends in each step."""
    proxy = Proxy(server_port)
    try:
        envs = make_vec_remote(
            url.replace(str(server_port), str(proxy.port)), num_envs=LANES, lanes=True, blocking=True,
            autoreset_mode="SameStep", on_lost="continue", **keywords,
        )  # fmt: skip
        envs.reset(seed=0)
        envs.step(np.zeros(LANES, np.int64))
        before = proxy.passed
        for _ in range(steps):
            envs.step(np.zeros(LANES, np.int64))
        passed = proxy.passed - before
        envs.close()
    finally:
        proxy.close()
    return passed


def test_no_reset_is_asked_for_where_lanes_end() -> None:
    with serve_gym(lambda: CountingEnv(1)) as server:
        url = next(url for url in server.urls if url.startswith("grpc"))
        together = bytes_of_steps(url, server.port, 50)
        apart = bytes_of_steps(url, server.port, 50, step_timeout=30.0)
    assert together < 0.8 * apart


def test_who_steps_by_send_and_recv_begins_the_next_episodes_with_send() -> None:
    found = []
    with serve_gym(lambda: CountingEnv(2)) as server:
        for lanes in (True, False):
            envs = make_vec_remote(server.url, num_envs=3, lanes=lanes, blocking=True, autoreset_mode="SameStep")
            zeros = np.zeros(3, np.int64)
            results: list[Any] = [envs.reset(seed=0)]
            results += [envs.step(zeros) for _ in range(3)]
            for _ in range(5):
                envs.send(zeros)
                results.append(envs.recv(3))
            results += [envs.step(zeros) for _ in range(3)]
            found.append(results)
            envs.close()
    assert_identical(*found)


def test_wrappers_of_several_modes_around_one_environment_each_keep_their_own() -> None:
    found = []
    with serve_gym(lambda: CountingEnv(2)) as server:
        for lanes in (True, False):
            remote = make_vec_remote(server.url, num_envs=3, lanes=lanes)
            modes = [BlockingReset(remote, autoreset_mode=mode) for mode in ("SameStep", "NextStep")]
            zeros = np.zeros(3, np.int64)
            results: list[Any] = [modes[0].reset(seed=0)]
            results += [envs.step(zeros) for _ in range(3) for envs in modes]
            results += [envs.step(zeros) for envs in modes for _ in range(5)]
            found.append(results)
            remote.close()
    assert_identical(*found)


def test_a_reset_during_a_step_loses_no_remark_on_the_beginnings_that_nobody_reads() -> None:
    """Each remark is sent once."""

    class Odd(CountingEnv):
        def reset(self, **given: Any) -> Any:
            observation, info = super().reset(**given)
            return observation, {**info, **({"handle": object()} if self.episode == 3 else {})}

    with serve_gym(lambda: Odd(1)) as server:
        envs: Any = make_vec_remote(server.url, num_envs=2, lanes=True, blocking=True, autoreset_mode="SameStep")
        zeros = np.zeros(2, np.int64)
        envs.reset(seed=0)
        envs.step(zeros)
        envs.step_async(zeros)
        envs.unwrapped.cancel()
        with pytest.warns(RuntimeWarning, match="handle"):
            observations, _ = envs.reset()
        assert observations.tolist() == [[4, 0]] * 2
        assert envs.step(zeros)[0].tolist() == [[5, 0]] * 2
        envs.close()


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a token": ({"token": "s3cret"}, {"token": "s3cret"}),
    "grpcio": ({}, {"transport": "grpcio"}),
    "a server on grpcio": ({"transport": "grpcio"}, {}),
    "gzip": ({}, {"compression": "gzip"}),
    "WebSocket": ({"web": True}, {}),
    "a process": ({"isolation": "process"}, {}),
    "threads": ({"thread_safe": True}, {}),
    "processes of lanes": ({"num_envs": 3, "vectorization_mode": "async"}, {}),
}


@pytest.mark.parametrize("way", [*WAYS, "a gateway"])
def test_episodes_are_those_of_worlds_by_every_way(way: str) -> None:
    def play(url: str, lanes: bool, keywords: dict[str, Any]) -> list[Any]:
        given = {} if "vectorization_mode" in served and lanes else {"num_envs": 3, "lanes": lanes}
        envs = make_vec_remote(url, blocking=True, autoreset_mode="SameStep", **given, **keywords)
        actions = np.random.default_rng(2).integers(2, size=(60, 3))
        found = [envs.reset(seed=4), *(envs.step(row) for row in actions)]
        envs.close()
        return found

    served, keywords = WAYS.get(way, ({}, {}))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve_gym("CartPole-v1", **served))
        plain = stack.enter_context(serve_gym("CartPole-v1"))
        url = server.url if way != "a gateway" else stack.enter_context(serve_gateway([server.url])).url
        mine = play(url.replace("grpc:", "ws:").partition("#")[0] if way == "WebSocket" else url, True, keywords)
        theirs = play(plain.url, False, {})
    assert sum(int(step[2].sum()) for step in mine[1:]) > 3
    assert_identical(mine, theirs)


def test_the_end_of_an_episode_is_told_with_the_observation_of_its_last_step() -> None:
    """Of lanes of several worlds, of which each tells with its Steps how its lanes began."""
    found = []
    with serve_gym(lambda: CountingEnv(3), num_envs=2) as one, serve_gym(lambda: CountingEnv(3), num_envs=3) as two:
        for apart in ({}, {"on_lost": "continue", "step_timeout": 30.0}):
            envs = make_vec_remote([one.url, two.url], blocking=True, autoreset_mode="SameStep", **apart)
            results = [envs.reset(seed=0), *(envs.step(np.zeros(5, np.int64)) for _ in range(8))]
            for *_, infos in results:
                infos.pop("valid", None)
            found.append(results)
            envs.close()
    for one_trip, two_trips in zip(*found, strict=True):
        assert [row[1] for row in one_trip[0].tolist()] == [row[1] for row in two_trips[0].tolist()]
        assert one_trip[-1].keys() == two_trips[-1].keys()
        if "final_obs" in one_trip[-1]:
            assert [row[1] for row in one_trip[-1]["final_obs"]] == [3] * 5
