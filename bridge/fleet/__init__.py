"""Servers of a fleet: started, watched and shown. `bridge.fleet.ray` needs the extra `ray`.

May be imported by the composition root.
"""
