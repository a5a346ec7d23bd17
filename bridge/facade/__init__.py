"""The composition root: what a call of a user assembles of the core and the features.

`serve` and `serve_parallel` put a server together, of its worlds, observers, recording and page; they import a feature
where it is used.

May be imported by `cli`, and by `bridge` itself.
"""
