"""`token`, `token_file` and `tls`: the same keywords, texts and errors of everything that connects or listens."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge import TLS, ClientCredentials, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.core.server.auth import (
    ListenKeywords,
    ListenOptions,
    ServerAccess,
    ServingKeywords,
    ServingOptions,
)
from bridge.core.transport.credentials import Access, AccessKeywords, ClientAccess
from bridge.dial import DialListener
from bridge.errors import SettingError
from bridge.policies import RemotePolicy, evaluate, serve_policy
from bridge.testing import check_server, make_certificates
from bridge.web.gateway import serve_gateway
from tests.parallel_envs import Relay

PACKAGE = Path(bridge.__file__).parent
NOWHERE = "127.0.0.1:1"


def _act(observations: Any) -> Any:
    return observations


def _dial(url: str = f"grpc://{NOWHERE}", **access: Any) -> None:
    with serve_gym("CartPole-v1", start=False) as server:
        server.dial(url, **access)


CONNECT: dict[str, Callable[..., Any]] = {
    "make_remote": lambda **access: make_remote(f"grpc://{NOWHERE}", **access),
    "make_vec_remote": lambda **access: make_vec_remote(f"grpc://{NOWHERE}", **access),
    "make_parallel_remote": lambda **access: make_parallel_remote(f"grpc://{NOWHERE}", **access),
    "WebSocket": lambda **access: make_remote(f"ws://{NOWHERE}", **access),
    "OpenEnv": lambda **access: make_remote(f"openenv://{NOWHERE}", **access),
    "RemotePolicy": lambda **access: RemotePolicy(f"ws://{NOWHERE}", **access),
    "evaluate": lambda **access: evaluate(f"grpc://{NOWHERE}", _act, **access),
    "check_server": lambda **access: check_server(f"grpc://{NOWHERE}", **access),
    "Server.dial": _dial,
}
LISTEN: dict[str, Callable[..., Any]] = {
    "serve_gym": lambda **access: serve_gym("CartPole-v1", **access),
    "serve_parallel": lambda **access: serve_parallel(Relay, **access),
    "serve_gateway": lambda **access: serve_gateway(f"grpc://{NOWHERE}", **access),
    "serve_policy": lambda **access: serve_policy(_act, **access),
    "DialListener": lambda **access: contextlib.closing(DialListener("listen://127.0.0.1:0", **access)),
    "listen://": lambda **access: make_vec_remote("listen://127.0.0.1:0", num_envs=1, **access),
}
EACH = [pytest.param(call, id=name) for name, call in {**CONNECT, **LISTEN}.items()]
CONNECTING = [pytest.param(call, id=name) for name, call in CONNECT.items()]
LISTENING = [pytest.param(call, id=name) for name, call in LISTEN.items()]


@pytest.mark.parametrize("call", EACH)
def test_a_token_that_is_given_twice_is_an_error(call: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^expected token or token_file, got both; give one of them$"):
        call(token="secret", token_file=tmp_path / "token")


@pytest.mark.parametrize("call", EACH)
def test_a_token_file_that_cannot_be_read_is_an_error(call: Callable[..., Any], tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "missing", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(SettingError, match=rf"^cannot read token_file='{re.escape(str(path))}': {problem}"):
            call(token_file=path)


@pytest.mark.parametrize("call", EACH)
def test_a_token_that_is_none_is_an_error_which_does_not_show_it(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "expected a token of 1 to 4096 visible ASCII characters without spaces"
    file = tmp_path / "token"
    file.write_text("two words")
    with pytest.raises(SettingError, match=rf"^{expected}") as of_token:
        call(token="two words")
    with pytest.raises(SettingError, match=rf"^token_file='.*': {expected}") as of_file:
        call(token_file=str(file))
    monkeypatch.setenv("BRIDGE_TOKEN", "two words")
    with pytest.raises(SettingError, match=rf"^the environment variable BRIDGE_TOKEN: {expected}") as of_variable:
        call()
    assert not any("two words" in str(caught.value) for caught in (of_token, of_file, of_variable))


@pytest.mark.parametrize("call", EACH)
def test_a_secret_in_the_place_of_its_file_is_in_no_error(call: Callable[..., Any]) -> None:
    # Base64 has slashes, also as the first character.
    for secret in ("f8c69f0d" * 8, "ab/cd+ef" * 5, "/ab+cdef" * 5, "x" * 5000, "with\0nul"):
        with pytest.raises(SettingError, match=r"^cannot read token_file=…: .*it may be the secret itself$") as caught:
            call(token_file=secret)
        assert secret not in str(caught.value)


def test_a_key_in_the_place_of_its_file_is_in_no_error(tmp_path: Path) -> None:
    pem = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0/c2VjcmV0\n-----END PRIVATE KEY-----\n"
    with pytest.raises(SettingError, match=r"^expected tls=TLS\(key=…\) to be a path or the bytes of") as caught:
        serve_gym("CartPole-v1", tls=TLS(certificate=pem.encode(), key=pem))
    assert "c2VjcmV0" not in str(caught.value)
    named = str(tmp_path / "missing.pem")
    with pytest.raises(SettingError, match=rf"^cannot read tls=TLS\(key='{re.escape(named)}'\): No such file"):
        serve_gym("CartPole-v1", tls=TLS(certificate=pem.encode(), key=named))


def test_what_is_wrong_with_a_token_is_counted() -> None:
    for token, got in (("", "got nothing: it is empty"), ("two words", "got 9 characters, 1 of them others")):
        with pytest.raises(SettingError, match=got):
            make_remote(f"grpc://{NOWHERE}", token=token)
    with pytest.raises(SettingError, match="got 5000 characters;"):
        make_remote(f"grpc://{NOWHERE}", token="x" * 5000)


@pytest.mark.parametrize("call", EACH)
def test_tls_is_a_group_whose_fields_are_no_keywords(call: Callable[..., Any]) -> None:
    with pytest.raises(SettingError, match=r"^expected tls to be bridge\.TLS\(…\), got a str$"):
        call(tls="ca.pem")


@pytest.mark.parametrize("call", CONNECTING)
def test_a_client_takes_no_certificates_of_servers(call: Callable[..., Any]) -> None:
    with pytest.raises(SettingError, match=r"^tls=TLS\(client_ca=…\) is for servers"):
        call(tls=TLS(client_ca="ca.pem"))


@pytest.mark.parametrize("call", LISTENING)
def test_a_server_takes_no_certificates_of_clients(call: Callable[..., Any]) -> None:
    with pytest.raises(SettingError, match=r"^tls=TLS\(ca=…\) and server_name are for clients"):
        call(tls=TLS(ca="ca.pem"))
    with pytest.raises(SettingError, match=r"^a server speaks TLS with a certificate of its own, and none is given"):
        call(tls=TLS(client_ca="ca.pem"))


@pytest.mark.parametrize("call", CONNECTING)
def test_tls_for_a_url_without_it_says_which_url_to_write(call: Callable[..., Any]) -> None:
    text = r"^tls= is for URLs with TLS, but '(\w+)://127\.0\.0\.1:1' is without: write \1s://$"
    with pytest.raises(SettingError, match=text):
        call(tls=TLS(server_name="a.example"))


# A client that opens a port waits there for servers, and so returns nothing to close.
@pytest.mark.parametrize("call", [each for each in LISTENING if each.id != "listen://"])
def test_a_token_file_that_others_can_read_is_warned_of_at_the_users_line(
    call: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    file.chmod(0o644)
    with pytest.warns(RuntimeWarning, match="other users of this machine can read the token") as caught:
        served = call(token_file=file)
    with served:
        assert [each.filename for each in caught] == [__file__]


FUNCTIONS: list[tuple[Callable[..., Any], type]] = [
    (make_remote, ClientAccess),
    (make_vec_remote, ClientAccess),
    (make_parallel_remote, ClientAccess),
    (RemotePolicy, ClientAccess),
    (check_server, ClientAccess),
    (bridge.Server.dial, ClientAccess),
    (ClientCredentials.of, ClientAccess),
    (DialListener, ServerAccess),
    (serve_gym, ServingOptions),
    (serve_parallel, ServingOptions),
    (serve_gateway, ServingOptions),
    (serve_policy, ListenOptions),
]


def _texts(what: Any) -> dict[str, str]:
    """What a docstring, or those of a class and what it is made of, say of each keyword."""
    found: dict[str, str] = {}
    for kind in what.__mro__ if isinstance(what, type) and dataclasses.is_dataclass(what) else [what]:
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(kind) or "", re.MULTILINE):
            found.setdefault(name, " ".join(text.split()))
    return found


@pytest.mark.parametrize(("function", "options"), FUNCTIONS)
def test_signature_and_docstring_have_the_keywords_and_texts_of_the_group(
    function: Callable[..., Any], options: type
) -> None:
    parameters = inspect.signature(function).parameters
    for field in dataclasses.fields(options):
        if field.init:
            found = parameters[field.name]
            assert (found.annotation, found.default) == (field.type, field.default)
            assert found.kind is found.KEYWORD_ONLY
    texts = _texts(function)
    described = _texts(options)
    for field in dataclasses.fields(options):
        if field.init:
            assert texts[field.name] == described[field.name]


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        (AccessKeywords, Access),
        (AccessKeywords, ClientAccess),
        (AccessKeywords, ServerAccess),
        (ListenKeywords, ListenOptions),
        (ServingKeywords, ServingOptions),
    ],
)
def test_type_checkers_see_the_keywords_that_the_dataclass_takes(keywords: type, options: type) -> None:
    assert set(inspect.get_annotations(keywords)) <= {field.name for field in dataclasses.fields(options)}
    known = {name for kind in keywords.__mro__ for name in inspect.get_annotations(kind)} | _all_keys(keywords)
    assert known == {field.name for field in dataclasses.fields(options) if field.init}


def test_a_token_that_was_read_is_printed_nowhere() -> None:
    for made in (ClientAccess(token="secret"), ServerAccess(token="secret")):
        assert "secret" not in repr(made)


def _all_keys(keywords: Any) -> set[str]:
    return set(keywords.__optional_keys__ | keywords.__required_keys__)


NAMES = {"token", "token_file", "tls"}
HOME = "core/transport/credentials.py"
OTHERS = {
    ("token", "perlert/client.py"): "the id by which a lobby knows a client that was there before",
}
"""Keywords of the same name that mean something else."""


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        # The file that `gymnasium-bridge standalone` prints has to do without this package.
        if not name.startswith(("standalone/", "pb/")):
            yield name, ast.parse(path.read_text("utf-8"))


def _declared(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Give the keywords that a module declares, each with the class or function that has it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in node.args.kwonlyargs:
                yield argument.arg, node.name
        elif isinstance(node, ast.ClassDef) and any("Keywords" in part or part == "TypedDict" for part in _bases(node)):
            yield from ((name, node.name) for name, _ in _fields(node))
        elif isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            for name, annotation in _fields(node):
                # What was read and checked, such as `token: Token | None`, is given by no user.
                if re.search(r"\b(TokenLike|PathLike|TLS)\b", annotation):
                    yield name, node.name


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, ast.unparse(each.annotation)


@pytest.mark.slow
def test_the_keywords_are_declared_in_one_place() -> None:
    found = {
        (keyword, module, owner)
        for module, tree in _modules()
        for keyword, owner in _declared(tree)
        if keyword in NAMES and (keyword, module) not in OTHERS
    }
    assert found == {(name, HOME, owner) for name in NAMES for owner in ("Access", "AccessKeywords")}


@pytest.mark.slow
def test_the_keywords_are_described_in_one_place() -> None:
    found = set()
    for module, tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for name in re.findall(r"^ +(\w+): ", ast.get_docstring(node) or "", re.MULTILINE):
                    # Of a function that takes one by position, it is an argument among others.
                    positional = name in _positional(node)
                    if name in NAMES and not positional and (name, module) not in OTHERS:
                        found.add((name, module, node.name))
    # What `tls` holds differs by the end.
    assert found == {
        ("token", HOME, "Access"),
        ("token_file", HOME, "Access"),
        ("tls", HOME, "ClientAccess"),
        ("tls", "core/server/auth.py", "ServerAccess"),
    }


def _positional(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        return {name for each in made for name in _positional(each)}
    return {argument.arg for argument in [*node.args.posonlyargs, *node.args.args]}


@pytest.mark.slow
def test_one_function_adds_the_options_of_commands() -> None:
    found = []
    for module, tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
                flags = [each.value for each in node.args if isinstance(each, ast.Constant)]
                found += [(module, flag) for flag in flags if re.match(r"--(token|tls)\b", str(flag))]
    assert found == []


def test_openenv_over_tls_is_known_by_the_ca_that_is_given(tmp_path: Path) -> None:
    certs = make_certificates(tmp_path / "certs")
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o600)
    tls = TLS(certificate=certs["server.pem"], key=certs["server.key"], client_ca=certs["ca.pem"])
    of_client = {"certificate": certs["client.pem"], "key": certs["client.key"]}
    with serve_gym("CartPole-v1", web=True, openenv=True, tls=tls, token_file=file) as server:
        for host, more in (("localhost", {}), ("127.0.0.1", {"server_name": "localhost"})):
            given = TLS(ca=certs["ca.pem"], **of_client, **more)
            with contextlib.closing(make_remote(f"openenvs://{host}:{server.port}", tls=given, token_file=file)) as env:
                observation, _ = env.reset(seed=0)
                assert observation.shape == (4,)
        with pytest.raises(bridge.errors.ConnectError, match=r"certificate verify failed|Hostname mismatch"):
            make_remote(
                f"openenvs://localhost:{server.port}",
                tls=TLS(ca=certs["ca.pem"], server_name="another.example", **of_client),
                token_file=file,
            )
