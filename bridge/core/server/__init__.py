"""The server: the session of a client, the registry of worlds, limits and rights, and a file for each transport.

May be imported by what is above the core.
"""
