"""Gymnasium data to and from the messages of dm_env_rpc, and how both ends merge frames that no step told one by one.

May be imported by `core.worlds.*`, `core.adapters`, `core.server`, `core.client.*`, and what is above the core.
"""
