"""What people see and do in a browser.

`page` has the files of the page, `watching` pictures, spectators, people who take over, and matches, `gateway` the
server that shows worlds of other servers.

May be imported by `web.*`, `perlert`, and the composition root.
"""
