"""Tests of both ends together, and of either with a peer: what arrives is what the environment gave."""
