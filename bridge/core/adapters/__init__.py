"""Wrappers around served environments: for arrays of other libraries than NumPy, for actions with a duration, and for
names of actions.

Each is a `bridge.core.worlds.sources.source.Adapter`, which the facade passes to the source of a server's worlds.

May be imported by what is above the core.
"""
