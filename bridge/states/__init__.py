"""Environments saved, restored and forked where they run, by one message of a session.

`SavedState` is what a client holds. Beside environments, `graph` takes and restores all that decides what comes next in
the `layers` of one: `copier` copies values by rules for each type, `restorer` for a living environment, whose
`generators` a seed seeds anew. `kinds` knows what cannot be copied by its fields (emulators, physics, what draws),
`scan` looks for what environments share, by what their code `uses` and what that changes on its `stack`, and `digest`
tells whether that has changed. Where one cannot be copied, `history` keeps what is done with it, and `replay` does that
again, beside what is `copyable`. `check` tries a kind of environment out in processes of their own, and `part` answers
requests beside environments: of one agent, of several, of lanes each by itself or all at once. In a server, `handler`
keeps to the bounds, and knows whose a state is.

May be imported by the composition root.
"""
