"""Recordings of episodes: written by a server or a client, replayed, verified and exported.

`files` has the format, `writer` the thread that writes, `tape` what goes through one environment; `reader` is the way
back.
"""
