"""Worlds of several agents, whose actions make one joint step."""
