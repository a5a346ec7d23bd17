"""`gymnasium-bridge check`: hold any dm_env_rpc server against the protocol. All of it is in `bridge.testing`."""

from bridge.testing.command import add_check_parser as register

__all__ = ["register"]
