"""Tests of `bridge.core.client`."""
