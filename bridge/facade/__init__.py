"""The composition root: it assembles the core and the features for a user's call.

`serve` and `serve_parallel` assemble a server from worlds, observers, a recording and a page. They import a feature
only if it is used.

May be imported by `cli`, and by `bridge` itself.
"""
