"""Tests of `bridge.perlert`."""
