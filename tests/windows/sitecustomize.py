"""Python imports this at its start where it is on the path: see `simulated_windows`."""

import simulated_windows

simulated_windows.install()
