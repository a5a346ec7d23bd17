"""Tests of `bridge.wrappers`."""
