"""The client: connections, remote environments and vectors of them."""
