"""Worlds of several agents, whose actions make one joint step.

May be imported by `core.worlds.realtime`, `core.worlds.sources`, and what is above the core.
"""
