"""Recordings of episodes: written by a server or a client, then replayed, verified and exported.

`rows` defines the columns, `files` the segments of Arrow and Parquet with their digests, `writer` the writing thread,
and `tape` records one environment; `reader` reads recordings, and `replay` compares them with the environment.

May be imported by the composition root, and `perlert` and `policies`, which record.
"""
