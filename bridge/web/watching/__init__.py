"""Pictures of worlds for people who watch or play: rendered, encoded, and given out as an observation.

May be imported by the composition root.
"""
