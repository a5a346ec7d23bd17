"""Who may come in: TLS, certificates of clients, tokens; and what those who may not are told."""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import gymnasium
import pytest

from bridge import TLS, Auth, errors, make_remote, make_vec_remote, serve_gym
from bridge.cli import main
from bridge.core.server.auth import Gate, Security
from bridge.core.transport.credentials import (
    TOKEN_VARIABLE,
    ClientCredentials,
    Token,
    read_pem,
    read_token,
    write_secret,
)
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, make_certificates
from tests.inside import as_another_machine, remote_of
from tests.peers import METHOD, SERVICE
from tests.support import until

SECRET = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_certificates(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Another authority's, with the same names in it."""
    return make_certificates(tmp_path_factory.mktemp("foreign"))


LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)


@pytest.fixture(scope="module")
def expired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_certificates(tmp_path_factory.mktemp("expired"), days=30, now=LONG_AGO)


@pytest.fixture
def made() -> list[int]:
    """Grows with every environment that a server makes."""
    return []


def counting(made: list[int]) -> Callable[[], CountingEnv]:
    def make() -> CountingEnv:
        made.append(1)
        return CountingEnv(5)

    return make


def tls(files: dict[str, Path], *, clients: bool = False) -> dict[str, Any]:
    return {"tls": TLS(files["server.pem"], files["server.key"], files["ca.pem"] if clients else None)}


def own(files: dict[str, Path], ca: Path) -> dict[str, Any]:
    return {"tls": TLS(files["client.pem"], files["client.key"], ca=ca)}


def plays(url: str, **keywords: Any) -> None:
    env = make_remote(url, timeout=20, **keywords)
    try:
        env.reset(seed=0)
        env.step(1)
    finally:
        env.close()


def test_a_token_and_tls_let_in_and_the_url_says_so(certs: dict[str, Path]) -> None:
    with serve_gym("CartPole-v1", token=SECRET, **tls(certs)) as server:
        url = server.url
        assert url.startswith("grpcs://127.0.0.1:")
        plays(url, token=SECRET, tls=TLS(ca=certs["ca.pem"]))
        plays(url, token=SECRET, tls=TLS(ca=certs["ca.pem"].read_bytes()))
        envs = make_vec_remote(url, num_envs=2, token=SECRET, tls=TLS(ca=str(certs["ca.pem"])), timeout=20)
        envs.reset(seed=0)
        envs.close()


def test_a_client_with_a_certificate_of_the_authority_comes_in(certs: dict[str, Path]) -> None:
    with serve_gym("CartPole-v1", **tls(certs, clients=True)) as server:
        plays(server.url, **own(certs, certs["ca.pem"]))


@pytest.mark.parametrize(
    ("keywords", "said"),
    [({}, "a token is required, and none was sent"), ({"token": SECRET[:-1]}, "the token is wrong")],
)
@pytest.mark.parametrize("make", [make_remote, make_vec_remote])
def test_without_the_token_a_client_is_refused_and_no_world_is_touched(
    make: Callable[..., Any],
    keywords: dict[str, Any],
    said: str,
    made: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG), serve_gym(counting(made), token=SECRET) as server:
        url = server.url
        with pytest.raises(errors.RefusedError, match=said) as caught:
            make(url, timeout=20, **keywords)
        assert caught.value.code == errors.Code.UNAUTHENTICATED
        assert "pass token=" in str(caught.value)
        assert made == []
        assert server.connections == 0
        assert "refused ipv4:127.0.0.1:" in caplog.text
        assert SECRET[:-1] not in caplog.text + str(caught.value)
        plays(url, token=SECRET)
        assert made == [1]


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", f"Basic {SECRET}", SECRET, f"Bearer {SECRET} ", f"bearer  {SECRET}"]
)
def test_the_header_is_read_as_rfc_6750_has_it(header: str) -> None:
    let_in = header.lower().startswith("bearer ") and SECRET in header
    with contextlib.nullcontext() if let_in else pytest.raises(errors.RequestError):
        Gate(Token(SECRET)).check(Gate.bearer(header), "a test")


def test_a_public_client_without_a_token_gets_one_answer_and_touches_nothing(made: list[int]) -> None:
    with (
        serve_gym(counting(made), token=SECRET) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        request = pb.EnvironmentRequest(join_world=pb.JoinWorldRequest()).SerializeToString()
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([request] * 3), timeout=10))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert made == []


@pytest.mark.parametrize(
    ("server_files", "clients", "keywords", "said"),
    [
        ("foreign", False, {"ca": "certs"}, "not signed by a CA that is trusted here"),
        ("expired", False, {"ca": "expired"}, "has expired"),
        ("certs", False, {}, "not signed by a CA that is trusted here"),
        ("certs", True, {"ca": "certs"}, "asks for a client's certificate"),
        ("certs", True, {"ca": "certs", "own": "foreign"}, "asks for a client's certificate"),
        ("certs", True, {"ca": "certs", "own": "expired"}, "asks for a client's certificate"),
    ],
    ids=["foreign server", "expired server", "no ca", "no certificate", "foreign certificate", "expired certificate"],
)
def test_a_certificate_that_is_not_in_order_is_refused(
    server_files: str,
    clients: bool,
    keywords: dict[str, Any],
    said: str,
    made: list[int],
    request: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}
    ca = request.getfixturevalue(keywords["ca"])["ca.pem"] if "ca" in keywords else None
    if ca is not None:
        given["tls"] = TLS(ca=ca)
    if "own" in keywords:
        given = own(request.getfixturevalue(keywords["own"]), ca)
    files = request.getfixturevalue(server_files)
    with caplog.at_level(logging.DEBUG), contextlib.ExitStack() as stack:
        with monkeypatch.context() as then:
            if server_files == "expired":  # it was not, when the server was started
                then.setattr("time.time", (LONG_AGO + datetime.timedelta(days=1)).timestamp)
            server = stack.enter_context(serve_gym(counting(made), token=SECRET, **tls(files, clients=clients)))
        with pytest.raises(errors.ConnectError, match=said) as caught:
            make_remote(server.url, timeout=20, token=SECRET, **given)
        until(lambda: "refused ipv4:127.0.0.1:" in caplog.text)
        assert made == []
        assert server.connections == 0
    assert SECRET not in caplog.text + str(caught.value)
    assert "PRIVATE KEY" not in caplog.text + str(caught.value)


def test_a_server_is_not_given_a_certificate_that_no_client_accepts(
    expired: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(errors.SettingError, match=r"valid from Jan  1 .* 2020 GMT until Jan 31 .* 2020 GMT, and now"):
        serve_gym("CartPole-v1", **tls(expired))
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=400)
    files = make_certificates(tmp_path / "certs", days=30, now=later)
    options = ["--tls-certificate", str(files["server.pem"]), "--tls-key", str(files["server.key"])]
    assert main(["serve", "CartPole-v1", *options]) == 2
    assert f"valid from {later:%b}" in capsys.readouterr().err


def test_plaintext_to_a_tls_port_says_to_use_tls(
    certs: dict[str, Path], made: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), serve_gym(counting(made), token=SECRET, **tls(certs)) as server:
        with pytest.raises(errors.ConnectError, match=r"does it speak TLS.*grpcs://"):
            make_remote(server.url.replace("grpcs", "grpc"), timeout=20, token=SECRET)
        until(lambda: "refused ipv4:127.0.0.1:" in caplog.text)
        assert made == []
        assert server.connections == 0
    assert SECRET not in caplog.text


def test_tls_to_a_plaintext_port_says_to_use_none(certs: dict[str, Path]) -> None:
    with (
        serve_gym("CartPole-v1") as server,
        pytest.raises(errors.ConnectError, match="speaks no TLS: use grpc://"),
    ):
        make_remote(server.url.replace("grpc", "grpcs"), tls=TLS(ca=certs["ca.pem"]), timeout=20)


def test_a_name_that_the_certificate_does_not_hold_is_refused(certs: dict[str, Path]) -> None:
    with (
        serve_gym("CartPole-v1", host="127.0.0.2", **tls(certs)) as server,
        pytest.raises(errors.ConnectError, match="is not for this name"),
    ):
        make_remote(server.url, tls=TLS(ca=certs["ca.pem"]), timeout=20)


def test_the_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    write_secret(file, f"{SECRET}\n".encode())
    with serve_gym("CartPole-v1", token_file=file) as server:
        plays(server.url, token_file=str(file))
        monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
        plays(server.url)
    with serve_gym("CartPole-v1") as server:
        monkeypatch.setenv(TOKEN_VARIABLE, "another")
        with pytest.raises(errors.RefusedError, match="the token is wrong"):
            make_remote(server.url, timeout=20)


@pytest.mark.parametrize("scheme", ["grpc", "ws"])
def test_who_is_refused_since_the_environments_token_was_kept_back_is_told_so(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with serve_gym("CartPole-v1", token=SECRET, web=True) as server:
        url = server.url.replace("grpc", scheme)
        with pytest.raises(errors.RefusedError, match=f"set the environment variable {TOKEN_VARIABLE}$"):
            make_remote(url, timeout=20)
        monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
        as_another_machine(monkeypatch, "core.transport.address")
        told = rf"{TOKEN_VARIABLE} is not sent unencrypted .*{scheme}s://"
        with pytest.raises(errors.RefusedError, match=told):
            make_remote(url, timeout=20)


def test_no_form_of_it_shows_the_token_and_a_pickled_one_still_works() -> None:
    token = Token(SECRET)
    held = ClientCredentials(token, tls_key=b"-----BEGIN SECRET")
    security = Security(token, tls_key=b"-----BEGIN SECRET")
    shown = f"{token!r} {token} {held!r} {held} {security!r}"
    assert SECRET not in shown
    assert "-----BEGIN" not in shown
    assert pickle.loads(pickle.dumps(token)) == token
    with serve_gym("CartPole-v1", token=SECRET) as server:
        envs = make_vec_remote(server.url, num_envs=2, token=SECRET)
        env = make_remote(server.url, token=SECRET)
        assert (
            SECRET not in f"{server!r} {envs!r} {env!r} {envs.spec!r} {env.spec!r} {vars(env)} {remote_of(env).request}"
        )
        again = env.spec.make() if env.spec is not None else None
        assert again is not None
        again.close()
        env.close()
        envs.close()


def test_what_is_no_token_or_no_certificate_is_refused_without_showing_it(tmp_path: Path) -> None:
    for value in ("", "two words", "ümlaut", "x" * 5000, 7):
        with pytest.raises(errors.SettingError, match=r"expected (a|the) token") as caught:
            serve_gym("CartPole-v1", token=value)  # type: ignore[arg-type]
        assert "two words" not in str(caught.value)
    with pytest.raises(errors.SettingError, match="got both"):
        read_token("a", tmp_path)
    with pytest.raises(errors.SettingError, match="cannot read token_file="):
        read_token(None, tmp_path / "none")
    with pytest.raises(errors.SettingError, match=r"cannot read tls=TLS\(ca="):
        read_pem("ca", str(tmp_path / "none"))
    with pytest.raises(errors.SettingError, match="line -----BEGIN"):
        read_pem("ca", b"no pem")


def test_a_certificate_without_its_key_or_with_another_is_refused(
    certs: dict[str, Path], foreign: dict[str, Path]
) -> None:
    with pytest.raises(errors.SettingError, match=r"expected tls=TLS\(certificate=…, key=…\), got one"):
        serve_gym("CartPole-v1", tls=TLS(certificate=certs["server.pem"]))
    with pytest.raises(errors.SettingError, match="a certificate of its own, and none is given"):
        serve_gym("CartPole-v1", tls=TLS(client_ca=certs["ca.pem"]))
    with pytest.raises(errors.SettingError, match="Expected a PEM certificate and its own key"):
        serve_gym("CartPole-v1", tls=TLS(certificate=certs["server.pem"], key=foreign["server.key"]))
    with pytest.raises(errors.SettingError, match=r"expected tls=TLS\(certificate=…, key=…\), got one"):
        make_remote("grpcs://localhost:1", tls=TLS(key=certs["client.key"]))
    with pytest.raises(errors.SettingError, match="write grpcs://"):
        make_remote("grpc://localhost:1", tls=TLS(ca=certs["ca.pem"]))
    with pytest.raises(errors.SettingError, match="a Unix socket needs none"):
        make_remote("unix:///nowhere", tls=TLS(ca=certs["ca.pem"]))
    with pytest.raises(errors.SettingError, match=r"client_ca=…\) cannot be used"):
        serve_gym("CartPole-v1", tls=TLS(certs["server.pem"], certs["server.key"], certs["server.key"]))
    with pytest.raises(errors.SettingError, match=r"TLS\(ca=…\) cannot be used"):
        make_remote("grpcs://localhost:1", tls=TLS(ca=certs["server.key"]))


@pytest.mark.parametrize(
    ("keywords", "lacks"),
    [
        ({}, "TLS and token: anyone who reaches port"),
        ({"token": SECRET}, "TLS: traffic of port"),
        ({"tls": True}, "token: anyone who reaches port"),
        ({"tls": True, "token": SECRET}, ""),
        ({"tls": True, "clients": True}, ""),
    ],
)
def test_beyond_loopback_what_is_missing_is_warned_of(
    keywords: dict[str, Any],
    lacks: str,
    certs: dict[str, Path],
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {name: keywords[name] for name in ("token",) if name in keywords}
    if keywords.get("tls"):
        given.update(tls(certs, clients=keywords.get("clients", False)))
    as_another_machine(monkeypatch, "core.server.core_server")
    serve_gym("CartPole-v1", **given).stop()
    said = [str(warning.message) for warning in recwarn.list]
    assert len(said) == bool(lacks)
    assert not lacks or lacks in said[0]


def test_the_command_makes_what_serves_and_overwrites_nothing(tmp_path: Path, capsys: Any) -> None:
    command = ["cert", "--out", str(tmp_path / "certs"), "--name", "gpu-box.lan"]
    assert main(command) == 0
    said = capsys.readouterr().out
    names = [f"{who}.{kind}" for who in ("ca", "server", "client") for kind in ("pem", "key")]
    assert all(name in said for name in names)
    assert all(option in said for option in ("--tls-certificate", "--tls-key", "--tls-ca", "--tls-client-ca"))
    files = {name: tmp_path / "certs" / name for name in names}
    assert all((files[name].stat().st_mode & 0o777 == 0o600) == name.endswith(".key") for name in names)
    with serve_gym("CartPole-v1", **tls(files, clients=True)) as server:
        plays(server.url, **own(files, files["ca.pem"]))
    assert main(command) == 2
    assert "already exists; delete it" in capsys.readouterr().err


def test_the_command_makes_a_token_that_only_its_owner_can_read_and_overwrites_nothing(
    tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "token"
    assert main(["token", "--out", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_bytes()
    assert read_token(None, file) == Token(before.decode().strip())
    with serve_gym("CartPole-v1", token_file=file) as server:  # without a warning
        plays(server.url, token_file=str(file))
    assert before.decode().strip() not in capsys.readouterr().out
    assert main(["token", "--out", str(file)]) == 2
    assert "already exists; delete it" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert main(["token", "--out", str(tmp_path / "no folder" / "token")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["token"]) == 0
    assert len(Token(capsys.readouterr().out.strip()).reveal()) >= 32


@pytest.mark.slow
def test_a_token_that_is_made_can_follow_an_option(capsys: Any) -> None:
    """One that began with a hyphen, as one of 64 in URL-safe Base64 does, would be taken for an option of its own."""
    for _ in range(300):
        assert main(["token"]) == 0
    made = capsys.readouterr().out.split()
    made += [Security().for_host("0.0.0.0", insecure=False).token.reveal() for _ in range(300)]
    assert len(set(made)) == 600
    assert all(token.isalnum() for token in made)


def test_the_log_of_a_server_with_tls_says_that_a_client_speaks_none(
    certs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with serve_gym("CartPole-v1", **tls(certs)) as server:
        with pytest.raises(errors.ConnectError, match="does it speak TLS"):
            make_remote(server.url.replace("grpcs:", "grpc:"), timeout=20)
        until(lambda: "The client speaks no TLS: its URL must begin with grpcs://" in caplog.text)


def test_the_log_of_a_server_says_that_a_client_does_not_accept_its_certificate(
    certs: dict[str, Path], foreign: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for trusted in (TLS(ca=foreign["ca.pem"]), TLS(), TLS(ca=certs["ca.pem"], server_name="elsewhere.lan")):
        caplog.clear()
        with serve_gym("CartPole-v1", **tls(certs)) as server:
            with pytest.raises(errors.ConnectError, match="certificate"):
                make_remote(server.url, timeout=20, tls=trusted)
            until(lambda: "The client does not accept this server's certificate" in caplog.text)


def test_a_server_warns_of_a_token_that_other_users_can_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_secret(file, SECRET.encode())
    file.chmod(0o644)
    with pytest.warns(RuntimeWarning, match="chmod 600") as said:
        serve_gym("CartPole-v1", token_file=file).stop()
    assert said[0].filename == __file__
    assert SECRET not in str(said[0].message)


def test_a_world_of_several_agents_asks_for_the_token_too(certs: dict[str, Path]) -> None:
    from bridge import serve_parallel
    from tests.parallel_envs import Relay

    with serve_parallel(Relay, token=SECRET, **tls(certs)) as server:
        assert server.url.startswith("grpcs://")
        with pytest.raises(errors.RefusedError, match="none was sent"):
            make_remote(server.url, tls=TLS(ca=certs["ca.pem"]), timeout=20)
        make_remote(server.url, tls=TLS(ca=certs["ca.pem"]), token=SECRET, timeout=20).close()


# Beyond loopback


def wide(**keywords):
    return serve_gym("CartPole-v1", host="0.0.0.0", **keywords)


def test_beyond_loopback_a_server_makes_a_token_and_its_url_lets_clients_in(monkeypatch, tmp_path):
    monkeypatch.delenv("BRIDGE_TOKEN", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    with pytest.warns(RuntimeWarning, match=r"listening on 0\.0\.0\.0 without TLS"):
        server = wide(unix_path=str(tmp_path / "s"))
    with server:
        token = server.url.partition("?token=")[2]
        assert len(token) > 40
        assert token not in repr(server)
        for url in server.urls:
            env = make_remote(url)
            env.reset(seed=0)
            assert (
                token not in f"{env!r} {env.spec!r} {copy.deepcopy(env.spec)!r} {pickle.loads(pickle.dumps(env)).spec}"
            )
            again = gymnasium.make(env.spec)
            again.reset(seed=0)
            again.close()
            env.close()
        for urls in (server.url, [server.url]):
            envs = make_vec_remote(urls, num_envs=2, spares=server.url)
            envs.reset(seed=0)
            assert token not in f"{envs.remotes()} {envs!r} {envs.spec}"
            envs.close()
        with pytest.raises(errors.RefusedError, match="a token is required") as caught:
            make_remote(f"grpc://127.0.0.1:{server.port}")
        assert caught.value.code == errors.Code.UNAUTHENTICATED
        with pytest.raises(errors.RefusedError, match="the token is wrong") as caught:
            make_remote(f"{server.url[:-1]}{'a' if server.url[-1] != 'a' else 'b'}")
        assert token[:-1] not in str(caught.value)


def test_insecure_makes_no_token_and_warns(monkeypatch):
    monkeypatch.delenv("BRIDGE_TOKEN", raising=False)
    with pytest.warns(RuntimeWarning, match=r"without TLS and token: anyone who reaches port"):
        server = wide(auth=Auth(insecure=True))
    with server:
        assert "token" not in server.url
        make_remote(f"grpc://127.0.0.1:{server.port}").close()


def test_a_given_token_stays_out_of_the_url(monkeypatch):
    monkeypatch.setenv("BRIDGE_TOKEN", "from-the-environment")
    for keywords in ({}, {"token": "given"}):
        with pytest.warns(RuntimeWarning, match="without TLS:"), wide(**keywords) as server:
            assert "token" not in server.url


def test_a_url_and_a_keyword_that_differ_in_their_token_are_refused():
    with pytest.raises(errors.SettingError, match="which differ"):
        make_remote("grpc://127.0.0.1:1?token=a", token="b")
