"""The id under which `gymnasium.make` and `gymnasium.make_vec` find remote environments."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["REMOTE_ID", "register_remote"]

REMOTE_ID = "bridge/Remote-v0"
"""Use it with `url=…` in `gymnasium.make`, and with `urls=…` in `gymnasium.make_vec`."""


def register_remote() -> None:
    """Register `bridge/Remote-v0` once: now, or after Gymnasium is imported, which takes half a second."""
    if "gymnasium" in sys.modules:
        _register()
    elif not any(isinstance(finder, _WhenGymnasiumIsImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenGymnasiumIsImported())


def _register() -> None:
    import gymnasium

    if REMOTE_ID not in gymnasium.registry:
        gymnasium.register(
            REMOTE_ID,
            entry_point="bridge.core.client.envs.env:RemoteEnv",
            vector_entry_point="bridge.wrappers.blocking_reset:make_blocking",
        )


class _WhenGymnasiumIsImported:
    """An import finder that registers the id after the first import of Gymnasium, and otherwise changes nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        # Removed first: the search below would call this finder again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        # Added again: a caller that only checks whether Gymnasium is installed does not import it.
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()
                sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
