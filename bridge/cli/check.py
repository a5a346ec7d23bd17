"""`gymnasium-bridge check`: check any dm_env_rpc server against the protocol. The code is in `bridge.testing`."""

from bridge.testing.command import add_check_parser as register

__all__ = ["register"]
