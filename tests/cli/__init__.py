"""Tests of `bridge.cli`."""
