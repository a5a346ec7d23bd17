"""Pictures of worlds for people who watch or play: rendered, encoded, and sent as an observation.

May be imported by the composition root.
"""
