"""Wrappers around served environments: other arrays than NumPy's, actions that say how long they last,
names of actions.

Each is a `bridge.core.worlds.sources.source.Adapter`, which the facade gives to the source of a server's worlds.

May be imported by what is above the core.
"""
