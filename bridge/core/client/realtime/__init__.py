"""Real-time worlds at the client: the additional observations of their answers, and Steps in flight.

May be imported by `core.client.world`, `core.client.slots`, and what is above the core.
"""
