"""Generated protobuf messages; see `proto/` for their sources."""
