"""The client: what a user's call says of servers, keywords and directories, and whose turn it is; parts in folders.

`wire` has connections, `world` one remote world, `realtime` what only worlds in real time have, `slots` the slots of a
vector environment, and `envs` the environments that a user gets. What is here is used by `slots` and `envs`.

May be imported by `core.client.slots`, `core.client.envs`, and what is above the core.
"""
