"""The functions for users that assemble a server: its worlds, observers, recording and page."""
