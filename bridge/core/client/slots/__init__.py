"""The slots of an environment: where their worlds are, what becomes of a slot whose world is lost, and the pool.

`slot`, `endpoint` and `policy` decide, without input or output; `pool` and `vector_pool` wait and execute.

May be imported by `core.client.envs`, and what is above the core.
"""
