"""Environments saved, restored and forked where they run, by one message of a session.

`SavedState` is what a client holds. Beside environments, `graph` copies all that decides what comes next, by `fields`
and `sets`; `kinds` knows what cannot be copied by its fields (emulators, physics, what draws), `scan` looks for what
environments share, and `digest` tells whether that has changed. Where one cannot be copied, `history` keeps what is
done with it, and `replay` does that again. `check` tries a kind of environment out in a process of its own, and `part`
answers requests beside environments. In a server, `handler` keeps to the bounds, and knows whose a state is.

May be imported by the composition root.
"""
