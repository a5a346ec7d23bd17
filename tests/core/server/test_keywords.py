"""Keywords in groups: `limits=Limits(…)`, `realtime=RealTime(…)`, `tls=TLS(…)`."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import bridge
from bridge import (
    TLS,
    Auth,
    Limits,
    RealTime,
    Recording,
    Web,
    errors,
    make_remote,
    make_vec_remote,
    serve_gym,
    serve_parallel,
)
from bridge.core.keywords import by_name
from bridge.errors import SettingError
from bridge.perlert import make_perlert_env, serve_perlert
from bridge.testing import check_server
from tests.parallel_envs import Relay

FUNCTIONS = [
    serve_gym,
    serve_parallel,
    serve_perlert,
    make_remote,
    make_vec_remote,
    bridge.make_parallel_remote,
    make_perlert_env,
    check_server,
]


@pytest.mark.parametrize(
    "fail",
    [
        lambda: make_remote("grpc://127.0.0.1:1"),
        lambda: make_vec_remote(["grpc://127.0.0.1:1", "grpc://127.0.0.1:1"]),
        lambda: bridge.make_parallel_remote("grpc://127.0.0.1:1"),
        lambda: gymnasium.make("bridge/Remote-v0", url="grpc://127.0.0.1:1"),
        lambda: make_remote("grpc://127.0.0.1:1", token_file="/no/such/file"),
        lambda: make_remote("http://127.0.0.1"),
        lambda: serve_gym("NoSuchEnvironment-v0"),
    ],
)
def test_an_error_that_explains_itself_has_a_traceback_of_one_frame_of_ours(fail: Callable[[], object]) -> None:
    with pytest.raises(errors.BridgeError) as caught:
        fail()
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert [Path(file).name for file in files if Path(file).is_relative_to(Path(bridge.__file__).parent)] == [
        "keywords.py"
    ]
    assert "The above exception" not in "".join(traceback.format_exception(caught.value))
    assert "During handling" not in "".join(traceback.format_exception(caught.value))


def test_what_an_environment_raised_keeps_its_traceback() -> None:
    def broken() -> gymnasium.Env[Any, Any]:
        raise ValueError("no map")

    with serve_gym(broken) as server, pytest.raises(errors.EnvironmentFailedError, match="no map") as caught:
        make_remote(server.url)
    assert "in broken" in str(caught.value)


def test_a_keyword_with_a_slip_names_the_one_that_is_near() -> None:
    with pytest.raises(
        TypeError, match=r"serve_gym\(\) got an unexpected keyword argument 'num_env': did you mean num_envs="
    ):
        serve_gym("CartPole-v1", num_env=3)  # type: ignore[call-arg]
    for make, slip, near in ((make_remote, "tokenfile", "token_file"), (make_vec_remote, "numenvs", "num_envs")):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{slip}': did you mean {near}="):
            make("grpc://127.0.0.1:1", **{slip: 3})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'match'$"):  # of serve_parallel, and not `auth`
        serve_gym("CartPole-v1", match=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("max_worlds", "give limits=Limits(max_worlds=…)"),
        ("drain_timeout", "give limits=Limits(drain_timeout=…)"),
        ("max_action_age", "give realtime=RealTime(max_action_age=…)"),
        ("clock", "give realtime=RealTime(clock=…)"),
        ("tls_key", "give tls=TLS(key=…)"),
        ("watch_token", "give auth=Auth(watch_token=…)"),
        ("insecure", "give auth=Auth(insecure=…)"),
        ("web_hosts", "give web=Web(hosts=…)"),
        ("play_fps", "give web=Web(play_fps=…)"),
        ("action_names", "give web=Web(action_names=…)"),
    ],
)
@pytest.mark.parametrize("serve", [serve_gym, serve_parallel])
def test_a_servers_keyword_that_is_in_a_group_says_in_which(serve: Any, keyword: str, remedy: str) -> None:
    text = f"{serve.__name__}() got an unexpected keyword argument '{keyword}': {remedy}"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        serve("CartPole-v1", **{keyword: 1})


def test_a_clients_keyword_that_is_in_a_group_says_in_which() -> None:
    url = "grpcs://127.0.0.1:1"
    for make in (make_remote, make_vec_remote, bridge.make_parallel_remote, bridge.RemoteEnv, bridge.RemoteVectorEnv):
        with pytest.raises(TypeError, match=r"argument 'tls_ca': give tls=TLS\(ca=…\)"):
            make(url, tls_ca="ca.pem")
    with pytest.raises(TypeError, match=r"argument 'tls_server_name': give tls=TLS\(server_name=…\)"):
        gymnasium.make("bridge/Remote-v0", url=url, tls_server_name="a.example")
    with pytest.raises(TypeError, match=r"make_remote\(\) got an unexpected keyword argument 'tls_cert'"):
        make_remote(url, tls_cert="x")


def test_what_is_no_group_is_refused() -> None:
    for keyword, group in (("limits", "Limits"), ("tls", "TLS"), ("auth", "Auth")):
        with pytest.raises(errors.SettingError, match=rf"expected {keyword} to be bridge.{group}\(…\), got a dict"):
            serve_gym("CartPole-v1", **{keyword: {}})
    with pytest.raises(errors.SettingError, match=r"expected realtime to be bridge.RealTime\(…\), got a float"):
        serve_gym("CartPole-v1", fps=10, realtime=0.5)  # type: ignore[arg-type]
    with pytest.raises(errors.SettingError, match=r"expected web to be True, False or bridge.Web\(…\), got 8080"):
        serve_gym("CartPole-v1", web=8080)  # type: ignore[arg-type]
    with pytest.raises(errors.SettingError, match=r"realtime=RealTime\(max_action_age=…\) is for real-time"):
        serve_gym("CartPole-v1", realtime=RealTime(max_action_age=0.5))
    with pytest.raises(errors.SettingError, match="default_action is for real-time worlds: give fps= too"):
        serve_gym("CartPole-v1", default_action=0)
    with pytest.raises(errors.SettingError, match=r"expected tls to be bridge.TLS\(…\), got a str"):
        make_remote("grpcs://127.0.0.1:1", tls="ca.pem")  # type: ignore[arg-type]


def test_certificates_of_the_other_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.SettingError, match=r"TLS\(ca=…\) and server_name are for clients.*client_ca=…"):
        serve_gym("CartPole-v1", tls=TLS(ca=tmp_path / "ca.pem"))
    with pytest.raises(errors.SettingError, match=r"TLS\(client_ca=…\) is for servers.*ca=…"):
        make_remote("grpcs://127.0.0.1:1", tls=TLS(client_ca=tmp_path / "ca.pem"))
    with pytest.raises(errors.SettingError, match="a certificate of its own, and none is given"):
        serve_gym("CartPole-v1", tls=TLS())


def test_no_form_of_certificates_shows_a_key() -> None:
    tls = TLS(certificate="server.pem", key=b"-----BEGIN PRIVATE KEY", ca=b"-----BEGIN CERTIFICATE")
    assert repr(tls) == "TLS(certificate='server.pem', key=…, ca=…)"
    assert repr(TLS(certificate="a", key="b")) == "TLS(certificate='a', key=…)"
    assert pickle.loads(pickle.dumps(tls)) == tls


def test_groups_are_frozen_and_equal_by_value() -> None:
    for group in (
        Limits(max_worlds=3),
        RealTime(max_action_age=0.5),
        TLS(ca="ca.pem"),
        Auth(watch_token="eyes"),
        Web(play_fps=20),
    ):
        assert group == dataclasses.replace(group)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(group, dataclasses.fields(group)[0].name, 1)


def test_a_world_of_several_agents_has_the_limits_that_are_given() -> None:
    limits = Limits(max_connections=2)  # it has three agents
    with serve_parallel(Relay, limits=limits) as server, pytest.raises(errors.RefusedError, match="max_connections=2"):
        bridge.make_parallel_remote(server.url)


def _documented(doc: str) -> set[str]:
    """The names in a docstring's section `Args:`; those with the same text stand side by side."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    names = re.findall(r"^    (\w+(?:, \w+)*):", section.group(1) if section else "", re.MULTILINE)
    return {name for entry in names for name in entry.split(", ")}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_docstring_lists_every_keyword_and_no_other(function: Any) -> None:
    parameters = set(inspect.signature(function).parameters)
    assert _documented(inspect.getdoc(function) or "") == parameters


@pytest.mark.parametrize("group", [Limits, RealTime, TLS, Auth, Web, Recording], ids=lambda group: group.__name__)
def test_a_docstring_lists_every_field_and_no_other(group: Any) -> None:
    assert _documented(inspect.getdoc(group) or "") == {field.name for field in dataclasses.fields(group)}


def test_both_ways_to_serve_have_the_same_options_after_their_own() -> None:
    gym, parallel = (list(inspect.signature(serve).parameters.values()) for serve in (serve_gym, serve_parallel))
    shared = [parameter.name for parameter in gym[-24:]]
    assert gym[-24:] == parallel[-24:]
    assert {"env_kwargs", "host", "fps", "realtime", "token", "tls", "auth", "limits", "record", "web"} <= set(shared)
    assert {parameter.name for parameter in gym[:-24]} & {parameter.name for parameter in parallel[:-24]} == {
        "env",
        "default_action",  # of one environment a value, of several agents a function
        "world",
    }


def test_no_group_shows_a_token() -> None:
    assert "secret" not in repr(Auth(watch_token="secret"))


def test_several_agents_are_served_at_a_unix_socket_too(tmp_path: Path) -> None:
    with serve_parallel(Relay, unix_path=str(tmp_path / "socket")) as server:
        assert server.urls == [server.url, f"unix://{tmp_path / 'socket'}"]
        env = bridge.make_parallel_remote(server.urls[1])
        assert set(env.reset(seed=1)[0]) == set(env.possible_agents)
        env.close()


def test_what_is_given_for_all_or_by_name_is_found_by_name() -> None:
    def still(observation: object) -> int:
        return 0

    assert by_name("agents", None, ["a", "b"], "agents") == {}
    assert by_name("agents", still, ["a", "b"], "agents") == {"a": still, "b": still}
    assert by_name("agents", {"b": "random"}, ["a", "b"], "agents") == {"b": "random"}
    with pytest.raises(SettingError, match=r"expected bots for slots of a, b, got \['c'\]"):
        by_name("bots", {"c": still}, ["a", "b"], "slots")
