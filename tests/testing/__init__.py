"""Tests of `bridge.testing`."""
