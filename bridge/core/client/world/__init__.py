"""One remote world: the protocol state of a stream to it, and how specs, Steps and answers are written and read.

May be imported by `core.client`, `core.client.slots`, `core.client.envs`, and what is above the core.
"""
