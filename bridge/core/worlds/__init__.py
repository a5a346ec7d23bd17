"""Worlds: environments that a server publishes, and that agents join.

`base` has what a world and its agents are, `hosts` an environment that is reset and stepped, `kinds` what is found out
about it; `isolated`, `realtime` and `multi_agent` have further kinds of worlds, and `sources` what makes all of them.

May be imported by `core.worlds.*`, `core.adapters`, `core.server`, and what is above the core.
"""
