"""Tests of `bridge.states`."""
