"""Bytes to and from messages: HTTP/2, gRPC, TLS, addresses and credentials. Knows nothing of environments."""
