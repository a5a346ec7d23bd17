"""Bytes to and from messages: HTTP/2, gRPC, TLS, addresses and credentials. Independent of environments.

May be imported by `core.server`, `core.client.*`, and what is above the core.
"""
