"""The environments that a user gets: one remote, many as a vector environment, and several agents for PettingZoo.

May be imported by what is above the core.
"""
