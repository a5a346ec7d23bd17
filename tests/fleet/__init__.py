"""Tests of `bridge.fleet`."""
