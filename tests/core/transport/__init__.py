"""Tests of `bridge.core.transport`."""
