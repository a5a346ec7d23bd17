"""Gymnasium data to and from the messages of dm_env_rpc."""
