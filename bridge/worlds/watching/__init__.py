"""Pictures of worlds for people who look on or play: rendered, encoded, and given out as an observation."""
