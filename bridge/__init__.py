"""Reinforcement-learning environments in one place, training loops in another: Gymnasium over dm_env_rpc."""

from bridge.client.remote_env import RemoteEnv, make_remote
from bridge.client.remote_vector_env import RemoteVectorEnv, make_vec_remote
from bridge.server.server import Server, serve_gym
from bridge.version import __version__

__all__ = [
    "RemoteEnv",
    "RemoteVectorEnv",
    "Server",
    "__version__",
    "make_remote",
    "make_vec_remote",
    "serve_gym",
]
