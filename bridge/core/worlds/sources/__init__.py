"""Sources of worlds: they make a world from an environment, in this process or in one of its own.

May be imported by what is above the core.
"""
