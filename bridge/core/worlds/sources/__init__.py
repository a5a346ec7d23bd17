"""Where worlds come from: a source makes them of an environment, in this process or in one of their own.

May be imported by what is above the core.
"""
