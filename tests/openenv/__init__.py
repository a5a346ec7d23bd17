"""Tests of `bridge.openenv`."""
