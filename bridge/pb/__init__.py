"""Generated protobuf messages; see `proto/` for their sources.

May be imported by everything.
"""
