"""Tests of `bridge.core.server`."""
