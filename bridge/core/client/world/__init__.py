"""One remote world: the protocol state of a stream to it, and how its specs, Steps and answers are written and read."""
