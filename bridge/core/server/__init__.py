"""The server: the registry of worlds, its limits, and a file for each transport."""
