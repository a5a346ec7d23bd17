"""Reinforcement-learning environments in one place, training loops in another: Gymnasium over dm_env_rpc."""

from bridge.server.server import Server, serve_gym
from bridge.version import __version__

__all__ = ["Server", "__version__", "serve_gym"]
