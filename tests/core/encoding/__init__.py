"""Tests of `bridge.core.encoding`."""
