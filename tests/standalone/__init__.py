"""Tests of `bridge.standalone`."""
