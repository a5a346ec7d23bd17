"""Recordings of episodes: written by a server or a client, replayed, verified and exported.

`rows` has the columns, `files` the segments of Arrow and Parquet with their digests, `writer` the thread that writes,
`tape` what goes through one environment; `reader` is the way back, and `replay` compares it with the environment.

May be imported by the composition root, and `perlert` and `policies`, which record.
"""
