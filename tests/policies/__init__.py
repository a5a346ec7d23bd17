"""Tests of `bridge.policies`."""
