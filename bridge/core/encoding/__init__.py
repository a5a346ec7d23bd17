"""Gymnasium data to and from the messages of dm_env_rpc.

May be imported by `core.worlds.*`, `core.adapters`, `core.server`, `core.client.*`, and what is above the core.
"""
