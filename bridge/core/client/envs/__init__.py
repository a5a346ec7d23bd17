"""The environments that users get: a single one, a vector of many, and one of several agents for PettingZoo.

May be imported by what is above the core.
"""
