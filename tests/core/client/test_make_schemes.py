"""URL schemes of other packages: imported only for a URL that a user's call names, by the interface that ours use."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import bridge
from bridge import (
    Endpoint,
    FileDirectory,
    RemoteEnv,
    RemoteVectorEnv,
    Scheme,
    Server,
    make_remote,
    make_vec_remote,
    serve_gym,
    serve_parallel,
)
from bridge.cli import main
from bridge.errors import AddressError, RefusedError, SettingError
from bridge.facade.make import FEATURES, GROUP
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.packages import Install, installer
from tests.places import ROOT
from tests.support import check_types, until

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEADLINE = 120.0
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL))
# Of a protocol of its own: it makes environments in this process, and counts them.
COUNTED = """
from bridge import Scheme
from bridge.testing import CountingEnv

made = []

def make_env(url, *, length=5, timeout=None, token=None):
    made.append((url, length, timeout, token))
    return CountingEnv(length)

SCHEME = Scheme(
    names=("counted", "counteds"), description="an environment that counts", make_env=make_env,
    keywords={"length": "steps an episode"},
)
"""
LISTED = """
from bridge import Endpoint, Scheme

closed = []

class Servers:
    def __init__(self, url, more):
        self.urls = [url.replace("listed", "grpc"), *more]

    def endpoints(self):
        return [Endpoint(url) for url in self.urls]

    def close(self):
        closed.append(True)

def make_directory(url, *, more=()):
    return Servers(url, more)

SCHEME = Scheme(
    names=("listed",), description="a list of servers", make_directory=make_directory, keywords={"more": "further URLs"}
)
"""
EVIL = "raise SystemExit('imported')"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return installer(tmp_path, monkeypatch, GROUP)


@pytest.fixture
def named(install: Install, tmp_path: Path) -> dict[str, str]:
    """Install the package of the page on plugins, and return the keyword that its scheme takes."""
    install("bridge-named", tomllib.loads(BLOCKS["pyproject.toml of a scheme"])["project"]["entry-points"][GROUP])
    (tmp_path / "bridge_named.py").write_text(BLOCKS["bridge_named.py"], encoding="utf-8")
    sys.modules.pop("bridge_named", None)
    return {"names_file": str(tmp_path / "lab.json")}


def write_names(options: dict[str, str], server: Server) -> None:
    Path(options["names_file"]).write_text(f'{{"cart": "{server.url}"}}', encoding="utf-8")


# The page on plugins


def test_the_scheme_of_the_page_on_plugins_works_for_one_many_and_blocking(named: dict[str, str]) -> None:
    assert len(BLOCKS["bridge_named.py"].splitlines()) <= 60
    with serve_gym("CartPole-v1") as server:
        write_names(named, server)
        with make_remote("named://cart", scheme_options=named, timeout=20.0) as env:
            assert isinstance(env, RemoteEnv)
            assert env.reset(seed=1)[0].shape == (4,)
        many = make_vec_remote(["named://cart", " NAMED://cart"], scheme_options=named)
        assert isinstance(many, RemoteVectorEnv)
        assert many.num_envs == 2
        many.close()
        envs = make_vec_remote("named://cart", num_envs=4, blocking=True, scheme_options=named, on_lost="raise")
        assert isinstance(envs, BlockingReset)
        assert envs.reset(seed=1)[0].shape == (4, 4)
        # It hands on that each step waits for every slot, so lanes are chosen as for a server's own URL.
        assert len([remote for remote in envs.remotes() if remote.slots]) == 1
        envs.close()
        with pytest.raises(AddressError, match=r"lab\.json has the names cart, not 'pole'\. Expected named://NAME"):
            make_remote("named://pole", scheme_options=named)


@pytest.mark.slow
def test_a_strict_type_checker_passes_on_the_scheme_of_the_page_on_plugins(named: dict[str, str]) -> None:
    folder = Path(named["names_file"]).parent
    calls = (
        "from bridge import make_remote, make_vec_remote\n\n"
        'make_remote("named://a", scheme_options={"names_file": "x"})\n'
        'make_vec_remote("named://a", blocking=True, on_lost="raise", scheme_options={"names_file": "x"})\n'
    )
    (folder / "calls.py").write_text(calls, encoding="utf-8")
    check_types(folder / "bridge_named.py", folder / "calls.py")


def test_gymnasium_makes_a_vector_of_another_packages_scheme_and_a_second_one_by_its_spec(
    named: dict[str, str],
) -> None:
    with serve_gym("CartPole-v1") as server:
        write_names(named, server)
        envs: Any = gymnasium.make_vec("bridge:bridge/Remote-v0", num_envs=2, urls="named://cart", scheme_options=named)
        assert envs.spec is not None
        again: Any = gymnasium.make_vec(pickle.loads(pickle.dumps(envs.spec)))
        np.testing.assert_array_equal(envs.reset(seed=3)[0], again.reset(seed=3)[0])
        envs.close()
        again.close()


# What a scheme may make


def test_a_scheme_that_makes_one_environment_has_slots_too(install: Install) -> None:
    install("counter", {"counted": "counted:SCHEME", "counteds": "counted:SCHEME"}, counted=COUNTED)
    env: Any = make_remote("COUNTED://a?token=secret", scheme_options={"length": 2}, timeout=7.0)
    assert type(env) is CountingEnv
    counted: Any = sys.modules["counted"]
    assert counted.made == [("counted://a?token=secret", 2, 7.0, None)]
    assert "secret" not in repr(counted.made)
    before = threading.active_count()
    envs = make_vec_remote(
        "counted://a", num_envs=3, blocking=True, scheme_options={"length": 2}, timeout=7.0, token="mine"
    )
    assert counted.made[1:] == [("counted://a", 2, 7.0, "mine")] * 3
    np.testing.assert_array_equal(envs.reset(seed=0)[0], [[1, 0]] * 3)
    *_, terminations, _, _ = envs.step(np.zeros(3, np.int64))
    assert not terminations.any()
    assert envs.step(np.zeros(3, np.int64))[2].all()
    envs.close()
    until(lambda: threading.active_count() <= before)  # a thread that ends may still be counted
    many = make_vec_remote(["counteds://a", "counteds://b"])
    assert {url for url, *_ in counted.made[4:]} == {"counteds://a", "counteds://b"}
    many.close()


def test_a_scheme_may_be_a_directory_which_is_closed_with_the_environment(install: Install) -> None:
    install("lister", {"listed": "listed:SCHEME"}, listed=LISTED)
    with serve_gym("CartPole-v1") as one, serve_gym("CartPole-v1") as two:
        url = one.url.replace("grpc", "listed")
        envs = make_vec_remote(url, num_envs=4, blocking=True, scheme_options={"more": [two.url]})
        assert isinstance(envs, BlockingReset)
        assert envs.reset(seed=0)[0].shape == (4, 4)
        assert {remote.url for remote in envs.remotes()} == {one.url, two.url}
        closed: list[bool] = sys.modules["listed"].closed  # type: ignore[attr-defined]
        assert not closed
        envs.close()
        assert closed == [True]
        with pytest.raises(SettingError, match=r"listed:// URLs \(a list of servers\) are for make_vec_remote alone"):
            make_remote(url)
        with pytest.raises(SettingError, match="alone, as a string, got it in a list"):
            make_vec_remote([url])


def test_a_vector_that_is_no_remote_one_says_so_where_blocking_is_asked_for(install: Install) -> None:
    source = """
import gymnasium
from bridge import Scheme

def make_vector_env(urls, num_envs=None):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs or len(urls))

SCHEME = Scheme(names=("own",), description="own", make_vector_env=make_vector_env, blocking=False)
"""
    install("owner", {"own": "own:SCHEME"}, own=source)
    envs: Any = make_vec_remote("own://a", num_envs=3)
    assert envs.reset(seed=0)[0].shape == (3, 4)
    envs.close()
    with pytest.raises(SettingError, match="blocking=True is for servers of dm_env_rpc, got own:// URLs"):
        make_vec_remote("own://a", blocking=True)
    with pytest.raises(SettingError, match="own:// has no worlds of lanes: leave lanes out"):
        make_vec_remote("own://a", lanes=True)
    with pytest.raises(SettingError, match=r"own:// URLs .* are for make_vec_remote alone"):
        make_remote("own://a")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: make_remote("counted://a", scheme_options={"lenght": 2}),
            "takes scheme_options of length with counted",
        ),
        (lambda: make_remote("grpc://a:1", scheme_options={"length": 2}), "takes no scheme_options with grpc:// URLs"),
        (
            lambda: make_vec_remote("file:///a", scheme_options={"length": 2}),
            "takes no scheme_options with file:// URLs",
        ),
        (
            lambda: make_vec_remote("listen://a:1", scheme_options={"x": 2}),
            "takes no scheme_options with listen:// URLs",
        ),
        (lambda: make_remote("counted://a", scheme_options=["length"]), "expected scheme_options to be a mapping"),
        (lambda: make_remote("counted://a", env_id="x"), "takes no env_id= with counted:// URLs"),
        (lambda: make_vec_remote("counted://a", env_id="x"), "takes no env_id= with counted:// URLs"),
        (lambda: make_vec_remote("counted://a", num_envs=2, tag="x"), "takes no tag= with counted:// URLs"),
        (lambda: make_remote("counted://a", action_space=None), "takes no action_space= with counted:// URLs"),
        (lambda: make_remote("grpc://a:1", tag="x"), "takes no tag= with grpc:// URLs"),
        (lambda: make_remote("openenv://a:1", tag="x"), "takes no tag= with openenv:// URLs"),
        (lambda: make_remote("counted://a", length=2), "unexpected keyword argument 'length'"),
        (
            lambda: make_remote("perlert://a:1/x", tag="x", scheme_options={"tag": "y"}),
            "got 'tag' twice: leave it out of scheme_options",
        ),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_keyword_that_a_scheme_does_not_take_is_told_with_the_scheme(install: Install, call: Any, told: str) -> None:
    install("counter", {"counted": "counted:SCHEME"}, counted=COUNTED)
    with pytest.raises(TypeError, match=told):
        call()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"names": ("a",)}, "expected make_env, make_vector_env or make_directory for a://, got none"),
        ({"names": (), "make_env": CountingEnv}, "expected names="),
        ({"names": "abc", "make_env": CountingEnv}, "expected names="),
        ({"names": ("A",), "make_env": CountingEnv}, "expected names="),
        ({"names": ("a", "b_c"), "make_env": CountingEnv}, "expected names="),
        ({"names": ("a",), "make_vector_env": list, "make_directory": list}, "or make_directory for a://, got both"),
    ],
    ids=["nothing", "no-names", "text", "upper-case", "underscore", "both"],
)
def test_a_scheme_that_says_nothing_of_use_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingError, match=re.escape(told)):
        Scheme(description="x", **fields)


# Who names it


class Listed:
    """A directory that a test changes."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(url) for url in self.urls]


def test_a_directory_has_no_package_imported(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("evil-package", {"evil": "evil_module:SCHEME"}, evil_module=EVIL)
    file = tmp_path / "urls.txt"
    file.write_text("evil://x\n")
    why = (
        "the scheme 'evil' is none of .*, which the servers of a directory have; another scheme is used only for a URL"
    )
    for directory in (Listed("evil://x"), FileDirectory(str(file)), f"file://{file}"):
        with pytest.raises(SettingError, match=why):
            make_vec_remote(directory, num_envs=1, timeout=5.0)
    install("lister", {"listed": "listed:SCHEME"}, listed=LISTED)
    with pytest.raises(SettingError, match=why):
        make_vec_remote("listed://127.0.0.1:1", num_envs=1, scheme_options={"more": ["evil://x"]})
    # Nor later, once slots are there.
    with serve_gym("CartPole-v1") as server:
        changing = Listed(server.url)
        envs = make_vec_remote(changing, num_envs=2)
        changing.urls.append("evil://x")
        server.stop(0.0)
        envs.reset()
        until(lambda: envs.step(envs.action_space.sample()) and "the scheme 'evil' is none of" in caplog.text)
        envs.close()
    assert "evil_module" not in sys.modules


def test_other_schemes_of_ours_are_refused_in_a_directory_too() -> None:
    for url in ("perlert://127.0.0.1:1/x:0", "openenv://127.0.0.1:1", "listen://127.0.0.1:0", "file:///x"):
        with pytest.raises(SettingError, match="another scheme is used only for a URL that your own call names"):
            make_vec_remote(Listed(url), num_envs=1)


def test_a_client_of_a_server_has_no_package_imported(install: Install) -> None:
    install("evil-package", {"evil": "evil_module:SCHEME"}, evil_module=EVIL)
    refused = "evil of the package evil-package is not imported because a client names it"
    isolations: list[Any] = [None, "process"]
    for isolation in isolations:
        served = serve_gym("bridge/Remote-v0", vectorization_mode="vector_entry_point", num_envs=2, isolation=isolation)
        with served as server, pytest.raises(RefusedError, match=refused):
            make_vec_remote(server.url, env_kwargs={"urls": "evil://x"})

    def relay(urls: str = "") -> Any:
        return make_vec_remote(urls, blocking=True)

    for serve in (serve_gym, serve_parallel):
        with serve(relay) as server, pytest.raises(RefusedError, match=refused):
            make_vec_remote(f"{server.url}?kwargs.urls=evil://x")
    assert "evil_module" not in sys.modules


def test_an_operator_may_serve_what_is_behind_another_packages_scheme(named: dict[str, str]) -> None:
    def relay() -> Any:
        return make_vec_remote("named://cart", num_envs=2, blocking=True, scheme_options=named)

    with serve_gym("CartPole-v1") as server:
        write_names(named, server)
        # Else the environments of both servers would be made in one thread, where one waits for the other.
        with serve_gym(relay, thread_safe=True) as front:
            envs = make_vec_remote(front.url, blocking=True)
            assert envs.reset(seed=0)[0].shape == (2, 4)
            envs.close()


# Which package


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import module_that_is_not_there", "cannot be loaded: ModuleNotFoundError: No module named 'module_that_is"),
        ("raise SystemExit(0)", "cannot be loaded: SystemExit: 0"),
        ("", "cannot be loaded: AttributeError: module 'broken' has no attribute 'SCHEME'"),
        ("SCHEME = 7", "cannot be loaded: SettingError: expected the entry point to name a bridge.Scheme"),
        (COUNTED, "among its names, got Scheme"),
        ("from bridge import Scheme\nSCHEME = Scheme(names=('x',), description='')", "got none"),
    ],
    ids=["import", "exit", "attribute", "type", "other-name", "empty"],
)
def test_a_broken_scheme_is_told_by_its_name_and_its_package_and_breaks_nothing_else(
    install: Install, source: str, told: str
) -> None:
    install("breaker", {"x": "broken:SCHEME"}, broken=source)
    install("counter", {"counted": "counted:SCHEME"}, counted=COUNTED)
    for call in (make_remote, make_vec_remote):
        with pytest.raises(SettingError) as caught:
            call("x://a")
        assert str(caught.value).startswith("the URL scheme x of the package breaker cannot be loaded")
        assert told in str(caught.value)
        assert str(caught.value).endswith("update or uninstall breaker")
    make_remote("counted://a").close()
    with serve_gym("CartPole-v1") as server:
        make_remote(server.url).close()


NOTHING = """
from bridge import Endpoint, Scheme

class Servers:
    def endpoints(self):
        return [Endpoint("nothing://elsewhere")]

    def close(self):
        raise ZeroDivisionError("as it is closed")

SCHEME = Scheme(names=("nothing",), description="x", make_env=lambda url: None, make_vector_env=lambda urls: [])
CLOSING = Scheme(names=("closing",), description="x", make_directory=lambda url: Servers())
"""


def test_a_scheme_that_makes_something_else_is_told_by_its_name(install: Install) -> None:
    install("nothing", {"nothing": "bridge_nothing:SCHEME"}, bridge_nothing=NOTHING)
    with pytest.raises(SettingError, match=r"make_env of the scheme nothing:// to return a gymnasium\.Env, got None"):
        make_remote("nothing://x")
    with pytest.raises(SettingError, match=r"make_vector_env of the scheme nothing:// to return .*VectorEnv, got \[\]"):
        make_vec_remote("nothing://x")


def test_a_directory_that_cannot_be_closed_hides_nothing_of_what_is_wrong(install: Install) -> None:
    install("closing", {"closing": "bridge_closing:CLOSING"}, bridge_closing=NOTHING)
    with pytest.raises(SettingError, match="another scheme is used only for a URL that your own call names"):
        make_vec_remote("closing://x", num_envs=1)


def test_of_two_packages_with_one_scheme_it_is_told_which_to_uninstall(install: Install) -> None:
    install("counter", {"counted": "counted:SCHEME"}, counted=COUNTED)
    install("copier", {"counted": "copied:SCHEME"}, copied=EVIL)
    with pytest.raises(
        SettingError, match="the packages copier and counter have a URL scheme counted each: uninstall all"
    ):
        make_remote("counted://a")
    assert "copied" not in sys.modules


def test_no_package_takes_the_place_of_a_scheme_of_ours(install: Install) -> None:
    ours = ["grpc", "grpcs", "ws", "wss", "unix", "file", "grpc+dns", "grpcs+dns", "dialed", "dialed+ws", *FEATURES]
    assert {"perlert", "openenv", "openenvs", "listen"} == {*FEATURES}
    install("evil-package", dict.fromkeys(ours, "evil_module:SCHEME"), evil_module=EVIL)
    with serve_gym("CartPole-v1") as server:
        make_remote(server.url).close()
        make_vec_remote([server.url]).close()
    for name in ours:
        for call in (make_remote, make_vec_remote):
            with pytest.raises((ValueError, bridge.errors.BridgeError)):
                call(f"{name}://")
    assert "evil_module" not in sys.modules


def test_an_unknown_scheme_is_told_with_all_that_there_are_and_nothing_is_imported(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    # What takes the place of none is not told as if it did.
    install("evil-package", {"evil": "evil_module:SCHEME", "perlert": "evil_module:SCHEME"}, evil_module=EVIL)
    expected = (
        "the scheme 'gprc' is none of grpc, grpcs, ws, wss, unix (make_remote and make_vec_remote also take perlert, "
        "openenv and openenvs, make_vec_remote file, grpc+dns, grpcs+dns and listen; installed are also evil of the "
        "package evil-package)"
    )
    for call in (make_remote, make_vec_remote, RemoteEnv):
        with pytest.raises(AddressError) as caught:
            call("gprc://a:1")
        assert expected in str(caught.value)
    with pytest.raises(AddressError, match="the scheme 'gprc' is none of"):
        make_vec_remote(["grpc://a:1", "gprc://a:1"])
    with pytest.raises(AddressError, match="use grpc://a:1"):
        make_vec_remote(["grpc://a:1", "http://a:1"])
    assert main(["info", "evil://x"]) == 2
    assert "the scheme 'evil' is none of grpc" in capsys.readouterr().err
    assert "evil_module" not in sys.modules


def test_urls_of_several_schemes_are_refused_and_nothing_is_imported(install: Install) -> None:
    install("evil-package", {"evil": "evil_module:SCHEME", "worse": "evil_module:SCHEME"}, evil_module=EVIL)
    for urls, special in (
        (["evil://x", "grpc://a:1"], "evil"),
        (["grpc://a:1", "evil://x"], "evil"),
        (["evil://x", "worse://x"], "evil"),
        (["perlert://a:1/x:0", "evil://x"], "perlert"),
        (["openenv://a:1", "perlert://a:1/x:0"], "openenv"),
    ):
        with pytest.raises(SettingError, match=f"expected {special}:// URLs alone, got a mixture of schemes"):
            make_vec_remote(urls)
    assert "evil_module" not in sys.modules


# Ours


def test_schemes_of_features_are_made_as_those_of_others() -> None:
    schemes: dict[str, Scheme] = {
        name: importlib.import_module(f"bridge.{folder}.scheme").SCHEME for name, folder in FEATURES.items()
    }
    assert all(isinstance(scheme, Scheme) and name in scheme.names for name, scheme in schemes.items())
    assert {name for scheme in schemes.values() for name in scheme.names} == FEATURES.keys()
    keywords = {keyword: text for scheme in schemes.values() for keyword, text in scheme.keywords.items()}
    assert len(keywords) >= 7
    for keyword, text in keywords.items():
        assert text
        with pytest.raises(TypeError, match=f"takes no {keyword}= with grpc:// URLs"):
            make_remote("grpc://127.0.0.1:1", **{keyword: None})  # type: ignore[arg-type]
    # A user may give those of ours as those of others are given.
    with pytest.raises(SettingError, match="tag"):
        make_remote("perlert://127.0.0.1:1/x:0", scheme_options={"tag": "x" * 1000})
