"""Tests across versions of Python, Gymnasium, NumPy and Protobuf: `make test-versions`."""
