"""The client: the keywords, URLs and directories of a user's calls, and the order of calls; subfolders for its parts.

`wire` has connections, `world` one remote world, `realtime` the parts for real-time worlds only, `slots` the slots of a
vector environment, and `envs` the environments for users. The modules in this folder are used by `slots` and `envs`.

May be imported by `core.client.slots`, `core.client.envs`, and what is above the core.
"""
