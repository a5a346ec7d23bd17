"""Finds the environments that the command line names: ids of Gymnasium's registry, or objects in a module."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import inspect
import os
import sys
import traceback
import types
import typing
from collections.abc import Sequence
from typing import Any

import gymnasium

from bridge.core.extras import install_command
from bridge.core.worlds.recipe import similar_ids
from bridge.errors import SettingError, StartError
from bridge.facade.policies import RANDOM

__all__ = ["ENV_HELP", "Target", "find_factory", "find_function", "find_policies", "find_target"]

ENV_HELP = (
    "a Gymnasium id; MODULE:ENV_ID imports the module first; MODULE:NAME is a function or class that makes an "
    "environment, or a PettingZoo module"
)
"""The help text of every argument that names an environment."""

_PETTINGZOO_MAKERS = ("parallel_env", "env", "raw_env")
_IMPORTING = (__file__, importlib.__file__, "<frozen importlib")
_EXPECTED = (
    "MODULE:NAME names an environment that the module registers with Gymnasium, a function or class of it that makes "
    "an environment, or a PettingZoo module in it"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """An environment to publish."""

    env: Any
    """The first argument of `serve_gym` or `serve_parallel`."""
    several_agents: bool
    """True for an environment of PettingZoo, which `serve_parallel` serves."""

    @property
    def factory(self) -> Any:
        """The id or callable that makes one environment, or a list of ids."""
        if isinstance(self.env, types.ModuleType):
            return getattr(self.env, "parallel_env", None) or self.env.env
        return self.env


def find_target(items: Sequence[str]) -> Target:
    """Read the positional arguments of `gymnasium-bridge serve`.

    Raises:
        SettingError: A module is missing, or has no such environment.
        StartError: A module raises when it is imported.
    """
    _search_here()
    found = [_find(item) for item in items]
    if len(found) == 1 and isinstance(found[0], Target):
        return found[0]
    for item, one in zip(items, found, strict=True):
        if isinstance(one, Target):
            raise SettingError(f"expected several ids of Gymnasium environments, or {item!r} alone: a zoo is of ids")
    ids = [one for one in found if isinstance(one, str)]
    is_zoo = len(ids) > 1 or any(character in ids[0] for character in "*?[")
    return Target(ids if is_zoo else ids[0], False)


def find_factory(item: str) -> Any:
    """Read the `--env` of a command that makes a recorded environment again; return its id or its factory.

    Raises:
        SettingError: See `find_target`; or it names several environments.
        StartError: A module raises when it is imported.
    """
    factory = find_target([item]).factory
    if isinstance(factory, list):
        raise SettingError(
            f"expected --env with what makes one environment, got {item!r}; to choose the episodes of some "
            "environments, write --env-id"
        )
    return factory


def find_policies(items: Sequence[str]) -> Any:
    """Read the policies of `gymnasium-bridge serve --agents`: one for all agents, or AGENT=POLICY for some.

    Returns:
        The value for `agents=` of `serve_parallel`.

    Raises:
        SettingError: A policy is neither `random`, a URL nor MODULE:FUNCTION; or its module is missing.
        StartError: Its module raises when it is imported.
    """
    # Search for `=` only before the URL, whose query may contain it too.
    cuts = [item.rfind("=", 0, item.find("://") if "://" in item else None) for item in items]
    pairs = [(item[: max(cut, 0)], "=", item[cut + 1 :]) for item, cut in zip(items, cuts, strict=True)]
    named = [agent for agent, _, _ in pairs if agent]
    if len(named) != len(pairs) and (named or len(pairs) > 1):
        raise SettingError(
            f"expected --agents with one policy for all, or AGENT=POLICY for some, got {' '.join(items)}"
        )
    found = {agent: _find_policy(text) for agent, _, text in pairs}
    return found if named else found[""]


def _find_policy(text: str) -> Any:
    if text == RANDOM or text.startswith(("ws://", "wss://")):
        return text
    return find_function(text, "as random, as its ws:// URL, or ")


def find_function(text: str, other_forms: str = "") -> Any:
    """Read a policy as MODULE:FUNCTION.

    Args:
        text: The given text.
        other_forms: Other permitted forms, for the error, such as `as random, or `.

    Raises:
        SettingError: It has another form, or its module is missing.
        StartError: Its module raises when it is imported.
    """
    module_name, colon, name = text.rpartition(":")
    if not (module_name and colon and all(part.isidentifier() for part in name.split("."))):
        raise SettingError(
            f"expected a policy {other_forms}as MODULE:FUNCTION that takes an observation and returns an action, "
            f"got {text!r}"
        )
    _search_here()
    found: Any = _import(module_name, text)
    for part in name.split("."):
        if not hasattr(found, part):
            raise SettingError(f"the module {module_name} has no {name!r}, which {text!r} names as a policy")
        found = getattr(found, part)
    return found


def _search_here() -> None:
    """Add the current folder to the import path, because the console script does not."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _find(item: str) -> str | Target:
    """Return the id, or the target in a module, that an argument names."""
    module_name, colon, name = item.rpartition(":")
    if not colon:
        return name
    module = _import(module_name, item)
    if not name:
        raise SettingError(f"expected MODULE:NAME, got {item!r} without a name; {_EXPECTED}")
    if name in gymnasium.registry or fnmatch.filter(gymnasium.registry, name):
        return name
    if not all(part.isidentifier() for part in name.split(".")):
        return item  # not an id either: the later error shows it as written
    found = _look_up(module, name, item)
    if inspect.ismodule(found):
        if not any(callable(getattr(found, maker, None)) for maker in ("parallel_env", "env")):
            raise SettingError(f"{item!r} is a module without parallel_env or env, so none of PettingZoo; {_EXPECTED}")
        return Target(found, True)
    if not callable(found):
        raise SettingError(f"{item!r} is of type {type(found).__name__}, which makes no environment; {_EXPECTED}")
    return Target(found, _makes_agents(found))


def _look_up(module: types.ModuleType, name: str, item: str) -> Any:
    """Return an attribute of a module, or a module in it."""
    found: Any = module
    try:
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except AttributeError:
        pass
    submodule = f"{module.__name__}.{name}"
    try:
        return importlib.import_module(submodule)
    except ImportError as error:
        if error.name is not None and submodule.startswith(error.name):
            close = " or ".join(similar_ids(f"{module.__name__}:{name}"))
            hint = f". Did you mean {close}? Expected: " if close else "; "
            raise SettingError(f"the module {module.__name__} has no {name!r}{hint}{_EXPECTED}") from error
        raise _missing(item, error) from error
    except Exception as error:  # an import may raise anything
        raise _broken(item, error) from error


def _import(module_name: str, item: str) -> types.ModuleType:
    module_name = module_name.removesuffix(".py")  # users may write the file name
    if {*"/\\"} & {*module_name} or not all(module_name.split(".")):
        raise SettingError(
            f"expected MODULE:NAME with a module as Python imports it, my_package.envs, got {item!r}; of a file, run "
            "this command in its folder, and write its name without the folder"
        )
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise _missing(item, error) from error
    except Exception as error:  # an import may raise anything
        raise _broken(item, error) from error


def _broken(item: str, error: Exception) -> StartError:
    """Return the error for a module that raises when it is imported, with the traceback."""
    why = f"cannot import the module of {item!r}: it raised {type(error).__name__}: {error}"
    return StartError(why, "".join(traceback.format_exception(type(error), error, _own_frames(error))))


def _own_frames(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the module's own frames on; None: there are none, such as for a missing module."""
    # Skip the frames of this file and of Python's import system.
    inside = error.__traceback__
    while inside is not None and inside.tb_frame.f_code.co_filename.startswith(_IMPORTING):
        inside = inside.tb_next
    return inside


def _missing(item: str, error: ImportError) -> SettingError:
    """Return the error for a module that cannot be imported, with what to install if that is known."""
    remedy = "Expected MODULE:NAME with a module that is installed or in the current folder"
    package = (error.name or "").partition(".")[0]
    if package == "pettingzoo":
        remedy += f"; install it by: {install_command('pettingzoo')}"
    elif isinstance(error, ModuleNotFoundError):
        remedy += f". If {package}.py is yours, run this command in its folder; if it is of a package, install that"
    # If the module exists, but one of its imports is missing, show the line of that import.
    frames = [each for each in traceback.extract_tb(_own_frames(error)) if not each.filename.startswith(_IMPORTING)]
    where = f" (imported in {frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return SettingError(f"cannot import the module of {item!r}: {error}{where}. {remedy}")


def _makes_agents(factory: Any) -> bool:
    """True if a callable makes environments of PettingZoo, as far as known without calling it."""
    made = factory
    if not inspect.isclass(factory):
        if getattr(factory, "__name__", "") in _PETTINGZOO_MAKERS:
            return True
        try:
            made = typing.get_type_hints(factory).get("return")
        except Exception:  # evaluating a user's annotations may raise anything
            return False
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in getattr(made, "__mro__", ())}
    return bool(kinds & {("pettingzoo", "ParallelEnv"), ("pettingzoo", "AECEnv")})
