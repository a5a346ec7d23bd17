"""The web page of a server: watching, playing, and the recordings.

`page` has the files of the page, `watching` pictures, spectators, takeovers and matches, and `gateway` the server that
shows worlds of other servers.

May be imported by `web.*`, `perlert`, and the composition root.
"""
