"""Reinforcement-learning environments in one place, training loops in another: Gymnasium over dm_env_rpc."""

from typing import TYPE_CHECKING, Any

from bridge.client.env import RemoteEnv, make_remote
from bridge.client.vector_env import RemoteVectorEnv, make_vec_remote
from bridge.encoding.space_json import register_space
from bridge.registration import register_remote
from bridge.server.serve import serve_gym
from bridge.server.server import Server
from bridge.version import __version__
from bridge.worlds.timed import TimeAction

if TYPE_CHECKING:
    from bridge.client.parallel_env import RemoteParallelEnv, make_parallel_remote
    from bridge.server.serve_parallel import serve_parallel

__all__ = [
    "RemoteEnv",
    "RemoteParallelEnv",
    "RemoteVectorEnv",
    "Server",
    "TimeAction",
    "__version__",
    "make_parallel_remote",
    "make_remote",
    "make_vec_remote",
    "register_space",
    "serve_gym",
    "serve_parallel",
]

register_remote()

# What needs an extra is imported when it is first asked for.
_LAZY = {
    "RemoteParallelEnv": "bridge.client.parallel_env",
    "make_parallel_remote": "bridge.client.parallel_env",
    "serve_parallel": "bridge.server.serve_parallel",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
