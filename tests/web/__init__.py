"""Tests of `bridge.web`."""
