"""Start, watch and show the servers of a fleet. `bridge.fleet.ray` needs the extra `ray`.

May be imported by the composition root.
"""
