"""The subjects of measurements: a module for each kind of work."""
