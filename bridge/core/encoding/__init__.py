"""Convert Gymnasium data to and from dm_env_rpc messages, and merge real-time frames between two steps.

May be imported by `core.worlds.*`, `core.adapters`, `core.server`, `core.client.*`, and what is above the core.
"""
