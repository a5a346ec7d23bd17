"""What other packages add by entry points: found by name, imported only where it is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bridge import serve_gym
from bridge.core.plugins import for_a_client, found, load, package_of
from bridge.errors import SettingError
from tests.packages import Install, installer

GROUP = "gymnasium_bridge.tests"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return installer(tmp_path, monkeypatch, GROUP)


def test_plugins_are_found_in_order_of_their_names_and_nothing_is_imported(install: Install) -> None:
    install("second", {"b": "plugin_b"}, plugin_b="raise OSError")
    install("first", {"c": "plugin_c", "a": "plugin_a:thing"})
    assert list(found(GROUP)) == ["a", "b", "c"]
    assert package_of(found(GROUP)["b"]) == "second"
    assert not {"plugin_a", "plugin_b", "plugin_c"} & sys.modules.keys()
    assert found("gymnasium_bridge.nothing") == {}


def test_a_plugin_is_a_module_or_an_object_of_one_and_is_imported_alone(install: Install) -> None:
    install("first", {"a": "plugin_a:thing", "b": "plugin_b"}, plugin_a="thing = 7", plugin_b="raise OSError")
    assert load(GROUP, "a", "thing") == 7
    assert "plugin_b" not in sys.modules


def test_an_error_says_what_there_is_where_no_package_has_a_plugin(install: Install) -> None:
    with pytest.raises(SettingError, match=r"no installed package has a thing 'x' \(installed: none\)"):
        load(GROUP, "x", "thing")
    install("first", {"a": "plugin_a", "b": "plugin_b"})
    with pytest.raises(SettingError, match=r"no installed package has a thing 'x' \(installed: a, b\)"):
        load(GROUP, "x", "thing")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import module_that_is_not_there", "ModuleNotFoundError: No module named 'module_that_is_not_there'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("", "AttributeError: module 'plugin_a' has no attribute 'thing'"),
        ("thing = ", "SyntaxError: invalid syntax"),
    ],
    ids=["import", "exit", "attribute", "syntax"],
)
def test_a_plugin_that_cannot_be_imported_is_told_by_name_and_package(install: Install, source: str, told: str) -> None:
    install("first", {"a": "plugin_a:thing", "b": "plugin_b"}, plugin_a=source, plugin_b="")
    with pytest.raises(SettingError) as caught:
        load(GROUP, "a", "thing")
    said = str(caught.value)
    assert said.startswith(f"the thing a of the package first cannot be loaded: {told}")
    assert said.endswith("; update or uninstall first")
    assert load(GROUP, "b", "thing") is sys.modules["plugin_b"]


def test_two_packages_with_a_plugin_of_one_name_are_both_told_even_where_they_name_one_module(
    install: Install,
) -> None:
    install("first", {"a": "plugin_a"}, plugin_a="raise OSError")
    install("second", {"a": "plugin_a"})
    with pytest.raises(SettingError, match="the packages first and second have a thing a each: uninstall all but one"):
        load(GROUP, "a", "thing")
    assert "plugin_a" not in sys.modules


def test_nothing_is_imported_because_a_client_names_it(install: Install) -> None:
    install("first", {"a": "plugin_a"}, plugin_a="")
    with (
        for_a_client(),
        pytest.raises(SettingError, match="the thing a of the package first is not imported because a client names"),
    ):
        load(GROUP, "a", "thing")
    assert "plugin_a" not in sys.modules
    load(GROUP, "a", "thing")


FAILING_WORLD = """
from bridge import TurnPacer

class Fails(TurnPacer):
    def __init__(self):
        raise ZeroDivisionError("as it is made")

    def decide(self, turn):
        return turn.wait()

class Other:
    pass

class Needs(Fails):
    def __init__(self, seconds):
        pass
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Fails", "ZeroDivisionError: as it is made"),
        ("Other", "SettingError: expected world='mine' to make a bridge.TurnPacer, got"),
        ("Needs", "SettingError: expected world='mine' to be made without arguments"),
        ("FAILING", "AttributeError: module 'failing_world' has no attribute 'FAILING'"),
    ],
)
def test_a_world_that_cannot_be_made_is_told_by_name_and_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    install = installer(tmp_path, monkeypatch, "gymnasium_bridge.worlds")
    install("worldly", {"mine": f"failing_world:{name}"}, failing_world=FAILING_WORLD)
    with pytest.raises(SettingError) as caught:
        serve_gym("CartPole-v1", world="mine")
    assert str(caught.value).startswith(f"the world mine of the package worldly cannot be loaded: {told}")
