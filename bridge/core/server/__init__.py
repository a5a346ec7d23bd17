"""The server: a client's session, the registry of worlds, limits and access rights, and the transports.

May be imported by what is above the core.
"""
