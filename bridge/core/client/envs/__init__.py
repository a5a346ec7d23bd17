"""The environments that a user gets: one remote, many as a vector environment, and several agents for PettingZoo."""
