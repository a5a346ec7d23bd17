"""Environments saved, restored and forked where they run, by one message of a session.

`SavedState` is what a client holds. Beside environments, `graph` copies all that decides what comes next, `kinds` knows
what cannot be copied by its fields (emulators, physics, what draws), `scan` looks for what environments share, `check`
tries a kind of environment out in a process of its own, and `part` answers requests there. In a server, `handler` keeps
to the bounds, and knows whose a state is.

May be imported by the composition root.
"""
