"""`lanes=`: whether one world of lanes fills all slots of a vector environment, or each has a world of its own."""

from __future__ import annotations

import contextlib
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from gymnasium.vector import SyncVectorEnv

from bridge import Limits, Observer, TimeAction, errors, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.dial import DialListener
from bridge.testing import CountingEnv, TestFailure
from bridge.web.gateway import serve_gateway
from bridge.wrappers import BlockingReset
from tests.parallel_envs import Relay
from tests.places import ROOT
from tests.public_server import EndStream, PublicServer, Refused
from tests.support import TAXI, keeping, read_property, until

EXAMPLES = ROOT / "examples"
Voting = runpy.run_path(str(EXAMPLES / "voting_world.py"))["Voting"]


@contextlib.contextmanager
def usual(url: Any, num_envs: int = 4, **keywords: Any) -> Iterator[Any]:
    """The usual call, `make_vec_remote(url, num_envs=4, blocking=True)`, with further keywords."""
    envs = make_vec_remote(url, num_envs=num_envs, **{"blocking": True, **keywords})
    try:
        yield envs
    finally:
        envs.close()


def forms(envs: Any) -> list[int]:
    """How many slots each of its worlds fills."""
    return [len(remote.slots) for remote in envs.remotes()]


def play(envs: Any, steps: int = 12) -> None:
    """Step all slots, each with observations of its space."""
    observations, _ = envs.reset(seed=3)
    envs.action_space.seed(3)
    for _ in range(steps):
        observations, rewards, *_ = envs.step(envs.action_space.sample())
        assert envs.observation_space.contains(observations)
        assert rewards.shape == (envs.num_envs,)


# What the server says


class Watching(Observer):
    """A user's own."""


@pytest.mark.parametrize(
    ("most", "keywords"),
    [
        (256, {}),  # of worlds there are 256 at most
        (3, {"limits": Limits(max_lanes=3)}),
        (3, {"limits": Limits(max_worlds=3)}),
        (0, {"limits": Limits(max_worlds=0)}),
        (0, {"num_envs": 2}),
        (0, {"vectorization_mode": "async"}),
        (0, {"fps": 50}),
        (0, {"thread_safe": True}),
        (0, {"isolation": "process"}),
        (0, {"allow_env_factories": True}),
        (0, {"web": True}),
        (0, {"observers": [Watching()]}),
        (0, {"world": Voting}),
        (256, {"time_action": TimeAction()}),
    ],
    ids=lambda value: ",".join(value) or "plain" if isinstance(value, dict) else None,
)
def test_a_server_says_for_how_many_lanes_these_are_as_good_as_worlds(most: int, keywords: dict[str, Any]) -> None:
    with serve_gym("CartPole-v1", **keywords) as server:
        assert read_property(server.url, "server.lanes") == most


def test_a_zoo_has_lanes_and_what_has_several_agents_none() -> None:
    with serve_gym(["CartPole-v1", TAXI]) as zoo, serve_parallel(Relay) as agents:
        assert read_property(zoo.url, "server.lanes") == 256
        assert read_property(agents.url, "server.lanes") == 0


@pytest.mark.slow
def test_each_process_of_a_server_says_it_of_itself() -> None:
    with serve_gym("CartPole-v1", processes=2) as servers:
        assert [read_property(url, "server.lanes") for url in servers.urls] == [256, 256]
        with usual(servers.urls[1]) as envs:
            assert forms(envs) == [4]


# What the call gets


def test_the_usual_call_gets_one_world_of_lanes() -> None:
    with serve_gym("CartPole-v1") as server:
        with usual(server.url, 64) as envs:
            assert isinstance(envs, BlockingReset)
            assert forms(envs) == [64]
            assert len(server.worlds) == 1
            play(envs)
        until(lambda: server.worlds == [])


@pytest.mark.parametrize(
    "keywords",
    [
        {"lanes": False},
        {"blocking": False},
        {"on_lost": "continue"},
        {"on_lost": "continue", "step_timeout": 5.0},
        {"num_envs": 1},
    ],
    ids=lambda keywords: ",".join(keywords),
)
def test_where_slots_need_not_wait_for_each_other_each_has_a_world(keywords: dict[str, Any]) -> None:
    with serve_gym("CartPole-v1") as server, usual(server.url, **keywords) as envs:
        assert set(forms(envs)) == {1}


@pytest.mark.parametrize(
    "keywords",
    [{"autoreset_mode": "SameStep"}, {"on_lost": "raise"}, {"blocking_timeout": 5.0}, {"max_failures": None}],
    ids=lambda keywords: ",".join(keywords),
)
def test_other_keywords_of_the_blocking_form_leave_the_lanes(keywords: dict[str, Any]) -> None:
    with serve_gym("CartPole-v1") as server, usual(server.url, **keywords) as envs:
        assert forms(envs) == [4]


@pytest.mark.parametrize(
    ("served", "query", "worlds"),
    [
        ({"num_envs": 2}, "", [2, 2]),
        ({}, "?num_envs=2", [2, 2]),
        ({}, "?num_envs=4", [4]),
        ({}, "?vectorization_mode=sync", [1, 1, 1, 1]),
        ({"limits": Limits(max_lanes=3)}, "", [1, 1, 1, 1]),
        ({"isolation": "process"}, "", [1, 1, 1, 1]),
        ({"thread_safe": True}, "", [1, 1, 1, 1]),
        ({"fps": 100}, "", [1, 1, 1, 1]),
        ({"web": True}, "", [1, 1, 1, 1]),
    ],
    ids=lambda value: ",".join(map(str, value)) if isinstance(value, dict) else str(value),
)
def test_where_lanes_would_be_noticed_the_usual_call_gets_what_it_got(
    served: dict[str, Any], query: str, worlds: list[int]
) -> None:
    with serve_gym("CartPole-v1", **served) as server, usual(server.url + query) as envs:
        assert forms(envs) == worlds
        envs.reset(seed=0)
        envs.step(np.zeros(4, np.int64))


def test_more_slots_than_there_may_be_worlds_are_refused_as_before() -> None:
    with serve_gym("CartPole-v1", limits=Limits(max_worlds=3)) as server:
        for lanes in (None, False):
            with pytest.raises(errors.RefusedError):
                make_vec_remote(server.url, num_envs=6, blocking=True, lanes=lanes)
        with usual(server.url, 6, lanes=True) as envs:  # who asks for lanes gets them up to max_lanes
            assert forms(envs) == [6]


def test_a_list_a_directory_a_named_world_and_spares_change_nothing(tmp_path: Path) -> None:
    listed = tmp_path / "urls.txt"
    with serve_gym("CartPole-v1") as one, serve_gym("CartPole-v1") as two:
        listed.write_text(f"{one.url}\n")
        with usual([one.url, two.url]) as envs:
            assert forms(envs) == [1, 1, 1, 1]
        with usual(listed.as_uri()) as envs:
            assert forms(envs) == [1, 1, 1, 1]
        with usual(one.url, spares=two.url) as envs:
            assert forms(envs) == [1, 1, 1, 1, 0]
        with usual(f"{one.url}?world=", 1) as envs:
            assert forms(envs) == [1]
        with usual([one.url]) as envs:  # a list of one URL is one URL
            assert forms(envs) == [4]


# lanes=True


def test_who_asks_for_lanes_gets_them_where_something_is_changed_too() -> None:
    for served in ({"isolation": "process"}, {"thread_safe": True}, {"web": True}, {"fps": 100}, {"num_envs": 2}):
        with serve_gym("CartPole-v1", **served) as server, usual(server.url, lanes=True) as envs:
            assert forms(envs) == [4], served
            envs.reset(seed=0)
            envs.step(np.zeros(4, np.int64))
    with serve_gym("CartPole-v1") as server, usual(server.url, lanes=True, blocking=False) as envs:
        assert forms(envs) == [4]


def test_spares_of_lanes_are_lanes() -> None:
    with (
        serve_gym(CountingEnv) as one,
        serve_gym(CountingEnv) as two,
        usual(one.url, lanes=True, spares=two.url) as envs,
    ):
        envs.reset(seed=0)
        until(lambda: [remote.state for remote in envs.remotes()] == ["running", "spare"])
        one.stop()
        *_, truncations, infos = envs.step(np.zeros(4, np.int64))
        assert truncations.all()
        assert infos["error"].all()
        envs.step(np.zeros(4, np.int64))
        assert len(two.worlds) == 1
        assert envs.remotes()[0].url == two.url


@pytest.mark.parametrize(
    ("target", "keywords", "why"),
    [
        ("{url}?world=", {}, "joins a world that exists"),
        ("{url}?num_envs=4", {}, "gives num_envs already: leave it out there"),
        (["{url}", "{url}"], {}, "there are 2 worlds to join.*give one URL"),
        ("file:///nowhere", {}, "a directory spreads worlds over its servers"),
        ("listen://127.0.0.1:0", {}, "a directory spreads worlds over its servers"),
        ("{url}", {"num_envs": None}, "num_envs was not given: give it too"),
        ("{url}", {"agent": "a"}, "agent='a' is one of several"),
        ("{url}", {"agent": ["a", "b"], "num_envs": None}, "there are 2 worlds to join"),
        ("openenv://127.0.0.1:1", {}, "openenv:// has no worlds of lanes: leave lanes out"),
        ("perlert://127.0.0.1:1/a:0", {"blocking": False}, "perlert:// has no worlds of lanes: leave lanes out"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_where_there_can_be_no_lanes_lanes_true_says_why(target: Any, keywords: dict[str, Any], why: str) -> None:
    with serve_gym("CartPole-v1") as server:
        urls = target.format(url=server.url) if isinstance(target, str) else [server.url for _ in target]
        with pytest.raises(errors.SettingError, match=why), usual(urls, lanes=True, **keywords):
            pass
        assert server.worlds == []
        assert server.connections == 0


def test_lanes_is_a_truth_value_or_none() -> None:
    for wrong in ("yes", 1, 4):
        with pytest.raises(errors.SettingError, match="expected lanes to be True, False or None, got"):
            make_vec_remote("grpc://127.0.0.1:1", num_envs=4, lanes=wrong)  # type: ignore[call-overload]


def test_a_server_refuses_lanes_that_were_asked_for_in_its_own_words() -> None:
    def simulator() -> SyncVectorEnv[Any, Any]:
        return SyncVectorEnv([CountingEnv] * 2)

    with serve_gym(simulator) as server, serve_gym(CountingEnv, limits=Limits(max_lanes=3)) as small:
        with pytest.raises(errors.RefusedError, match="simulator returns a vector environment of 2 lanes"):
            make_vec_remote(server.url, num_envs=4, blocking=True, lanes=True)
        with pytest.raises(errors.RefusedError, match="an integer from 1 to 3"):
            make_vec_remote(small.url, num_envs=4, blocking=True, lanes=True)


# Through Gymnasium


def test_gymnasium_s_make_vec_takes_lanes_too() -> None:
    with serve_gym("CartPole-v1") as server:
        for keywords, expected in (({}, [3]), ({"lanes": True}, [3]), ({"lanes": False}, [1, 1, 1])):
            envs: Any = gymnasium.make_vec("bridge:bridge/Remote-v0", num_envs=3, url=server.url, **keywords)
            assert forms(envs) == expected
            again: Any = gymnasium.make_vec(envs.spec)
            assert forms(again) == expected
            assert again.spec.kwargs.get("lanes") == keywords.get("lanes")
            envs.close()
            again.close()


def test_a_spec_leaves_the_choice_to_the_server_that_it_meets() -> None:
    with serve_gym("CartPole-v1") as server, serve_gym("CartPole-v1", thread_safe=True) as other:
        with usual(server.url) as envs:
            spec = envs.spec
        spec.kwargs["urls"] = other.url
        again: Any = gymnasium.make_vec(spec)
        assert forms(again) == [1, 1, 1, 1]
        again.close()


# Where the lanes cannot be made


class Picky(CountingEnv):
    """Its constructor fails where it says so."""

    made = 0
    fails = frozenset[int]()

    def __init__(self) -> None:
        type(self).made += 1
        if type(self).made in type(self).fails:
            raise TestFailure(f"environment {type(self).made} cannot be made")
        super().__init__()


def picky(*fails: int) -> type[Picky]:
    return type("Picky", (Picky,), {"made": 0, "fails": frozenset(fails)})


def test_where_a_constructor_raises_the_client_asks_for_worlds() -> None:
    kind = picky(3)
    with serve_gym(kind) as server:
        with usual(server.url) as envs:
            assert forms(envs) == [1, 1, 1, 1]
            play(envs)
            assert len(server.worlds) == 4
        assert kind.made == 3 + 4
        until(lambda: server.worlds == [])


def test_only_where_the_worlds_fail_too_does_the_call_raise() -> None:
    kind = picky(*range(2, 100))
    with serve_gym(kind) as server:
        with pytest.raises(errors.EnvironmentFailedError, match="cannot be made"), usual(server.url):
            pass
        until(lambda: server.worlds == [])


def test_lanes_that_the_user_asked_for_are_not_replaced_by_worlds() -> None:
    with (
        serve_gym(picky(3)) as server,
        pytest.raises(errors.EnvironmentFailedError, match="environment 3 cannot be made"),
    ):
        make_vec_remote(server.url, num_envs=4, blocking=True, lanes=True)


def test_a_wrong_argument_is_told_as_before() -> None:
    with serve_gym("CartPole-v1") as server:
        with pytest.raises(errors.RefusedError, match=r"could not be made with env_kwargs=.*'gravitas'.*It takes"):
            make_vec_remote(server.url, num_envs=4, blocking=True, env_kwargs={"gravitas": 1})
        with pytest.raises(errors.RefusedError, match="'Nope-v1' is not served here"):
            make_vec_remote(f"{server.url}/Nope-v1", num_envs=4, blocking=True)


def test_a_simulator_of_lanes_is_constructed_once() -> None:
    """A simulator may be there but once in a process: it is not made to see what the function returns."""
    factory, made = keeping(CountingEnv)
    with serve_gym(lambda: SyncVectorEnv([factory] * 2)) as server:
        assert read_property(server.url, "server.lanes") == 256, "nobody knows yet what the function returns"
        with usual(server.url, 2) as envs:
            assert forms(envs) == [2]
            assert [env.closed for env in made] == [False, False]
            assert envs.reset(seed=0)[0].tolist() == [[1, 0], [1, 0]]
        assert read_property(server.url, "server.lanes") == 0
        with usual(server.url) as envs:
            assert forms(envs) == [2, 2]
        assert len(made) == 6
    assert all(env.closed for env in made)


def test_a_simulator_that_no_client_takes_is_closed_with_the_server() -> None:
    factory, made = keeping(CountingEnv)
    with serve_gym(lambda: SyncVectorEnv([factory] * 2)) as server:
        with pytest.raises(errors.RefusedError, match="returns a vector environment of 2 lanes"):
            make_remote(f"{server.url}?num_envs=4")
        assert [env.closed for env in made] == [False, False]
    assert [env.closed for env in made] == [True, True]


def test_single_environments_of_a_function_are_made_once_each() -> None:
    factory, made = keeping(CountingEnv)
    with serve_gym(factory) as server, usual(server.url) as envs:
        assert forms(envs) == [4]
        assert len(made) == 4


# Other servers


class Odd(PublicServer):
    """One that does not expect a LeaveWorld before a world was joined (D-16)."""

    def __init__(self, how: str) -> None:
        super().__init__(kind="discrete", properties=False)
        self.how = how

    def on_leave_world(self, agent: Any, request: Any) -> Any:
        if agent.world is None and self.how == "ends the stream":
            raise EndStream
        if agent.world is None and self.how == "refuses":
            raise Refused(9, "no world is joined")
        if agent.world is None and self.how == "raises":
            raise BaseException("never expected")
        return super().on_leave_world(agent, request)


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
@pytest.mark.parametrize("how", ["serves", "refuses", "ends the stream"])
def test_another_server_is_asked_for_no_property_and_makes_worlds(how: str, transport: Any) -> None:
    with Odd(how) as server, usual(server.url, transport=transport) as envs:
        assert forms(envs) == [1, 1, 1, 1]
        envs.reset()
        observations, *_ = envs.step(np.zeros(4, np.int64))
        assert observations.shape == (4, 4)
        assert server.requests["extension"] == 0
        assert server.requests["leave_world"] == 1


def test_another_server_that_does_not_answer_is_asked_nothing_after_a_while() -> None:
    with (
        PublicServer(["silent_leave"], kind="discrete", properties=False) as server,
        usual(server.url, connect_timeout=0.2) as envs,
    ):
        assert forms(envs) == [1, 1, 1, 1]


def test_another_server_with_one_world_gives_that() -> None:
    """D-4."""
    with (
        PublicServer(kind="discrete", properties=False, create=False, max_agents=8) as server,
        usual(server.url) as envs,
    ):
        assert forms(envs) == [1, 1, 1, 1]


def test_another_server_that_knows_no_lanes_cannot_be_asked_for_them() -> None:
    class Lenient(PublicServer):
        def on_create_world(self, agent: Any, request: Any) -> Any:
            return super().on_create_world(agent, pb.CreateWorldRequest())

    with (
        Lenient(kind="discrete", properties=False) as server,
        pytest.raises(errors.SettingError, match=r"make a world of 4 lanes, got one that fills 1 of the slots"),
    ):
        make_vec_remote(server.url, num_envs=4, blocking=True, lanes=True)


def test_nobody_at_the_url_is_told_as_before() -> None:
    with PublicServer(kind="discrete") as server:
        url = server.url
    with pytest.raises(errors.ConnectError, match="no connection"):
        make_vec_remote(url, num_envs=4, blocking=True)


# Ways to a server


@pytest.mark.parametrize("way", ["unix", "token", "a path", "grpcio", "served by grpcio", "gzip"])
def test_the_usual_call_gets_lanes_by_every_way(way: str, tmp_path: Path) -> None:
    served: dict[str, Any] = {"unix": {"unix_path": str(tmp_path / "s")}, "token": {"token": "s3cret"}}.get(way, {})
    if way == "served by grpcio":
        served["transport"] = "grpcio"
    env = ["CartPole-v1", TAXI] if way == "a path" else "CartPole-v1"
    given = {"token": {"token": "s3cret"}, "grpcio": {"transport": "grpcio"}, "gzip": {"compression": "gzip"}}
    keywords: dict[str, Any] = given.get(way, {})
    with serve_gym(env, **served) as server:
        url = next(url for url in server.urls if url.startswith("unix" if way == "unix" else "grpc"))
        with usual(f"{url}/{TAXI}" if way == "a path" else url, **keywords) as envs:
            assert forms(envs) == [4]
            play(envs)


def test_over_websocket_the_usual_call_gets_worlds_which_the_page_shows() -> None:
    with serve_gym("CartPole-v1", web=True) as server, usual(server.url.replace("grpc", "ws")) as envs:
        assert forms(envs) == [1, 1, 1, 1]
        play(envs)


def test_a_wrong_token_is_told_as_before() -> None:
    with serve_gym("CartPole-v1", token="s3cret") as server:
        with pytest.raises(errors.RefusedError) as caught:
            make_vec_remote(server.url, num_envs=4, blocking=True, token="other")
        assert caught.value.code == errors.Code.UNAUTHENTICATED


def test_an_environment_sent_by_the_client_gets_worlds_unless_it_asks_for_lanes() -> None:
    with serve_gym("CartPole-v1", allow_env_factories=True) as server:
        for lanes, expected in ((None, [1, 1]), (True, [2])):
            with usual(server.url, 2, env=CountingEnv, lanes=lanes) as envs:
                assert forms(envs) == expected
                assert envs.reset(seed=0)[0].tolist() == [[1, 0], [1, 0]]


def test_servers_that_dial_in_get_worlds() -> None:
    listener = DialListener("listen://127.0.0.1:0", timeout=30.0)
    with (
        contextlib.closing(listener),
        serve_gym(CountingEnv, dial=f"grpc://127.0.0.1:{listener.port}"),
        usual(listener) as envs,
    ):
        assert forms(envs) == [1, 1, 1, 1]


def test_a_gateway_which_people_watch_through_makes_worlds() -> None:
    with serve_gym(CountingEnv) as server, serve_gateway([server.url]) as gateway, usual(gateway.url) as envs:
        assert forms(envs) == [1, 1, 1, 1]
        assert envs.reset(seed=0)[0].tolist() == [[1, 0]] * 4


def test_two_clients_share_a_server() -> None:
    with (
        serve_gym(CountingEnv, limits=Limits(max_worlds=4)) as server,
        usual(server.url) as first,
        usual(server.url, 3) as second,
        usual(server.url, 2, lanes=False) as third,
    ):
        assert [forms(envs) for envs in (first, second, third)] == [[4], [3], [1, 1]]
        for envs in (first, second, third):
            assert envs.reset(seed=0)[0].tolist() == [[1, 0]] * envs.num_envs
        for step in (1, 2):
            for envs in (first, second, third):
                assert envs.step(np.zeros(envs.num_envs, np.int64))[0].tolist() == [[1, step]] * envs.num_envs
