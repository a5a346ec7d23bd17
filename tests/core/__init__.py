"""Tests of the core as a whole, and of its small helpers."""
