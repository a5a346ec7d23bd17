"""Real-time worlds: what their answers tell besides observations, and Steps in flight.

May be imported by `core.client.world`, `core.client.slots`, and what is above the core.
"""
