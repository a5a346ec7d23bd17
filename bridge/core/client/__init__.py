"""The client: remote environments and vectors of them, as the user gets them; each folder is one of their parts."""
