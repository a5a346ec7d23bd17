"""Tests of `bridge.core.worlds`."""
