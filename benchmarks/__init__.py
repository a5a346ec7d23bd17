"""Side by side against peers: `python -m benchmarks`. How to add to it stands in `benchmarks/registry.py`."""
