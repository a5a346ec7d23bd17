"""Tests of `bridge.game`."""
