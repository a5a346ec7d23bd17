"""Tests of `bridge.dial`."""
