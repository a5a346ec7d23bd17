"""Save, restore and fork environments where they run, by one message of a session.

A client holds a `SavedState`. In the process of the environment:

- `graph` takes and restores a snapshot of everything that decides how an environment goes on. It works on the `layers`:
  the environment and its wrappers. `copier` copies values by rules for each type; `restorer` copies them back into a
  living environment, and reseeds its `generators` if a seed is given.
- `kinds` handles objects that cannot be copied field by field: emulators, physics engines, and objects that draw.
- `scan` finds what environments of a process share. `uses` reads that from their code, and `stack` finds which shared
  values the code changes. `digest` shows whether shared values have changed.
- If an environment cannot be copied, `history` keeps its actions, and `replay` executes them again; the fields that are
  `copyable` are put back or compared.
- `check` tries out a kind of environment in separate processes.
- `part` answers requests, for single environments, for several agents, and for lanes alone or all at once.

In the server, `handler` enforces the limits and knows the owner of each state.

May be imported by the composition root.
"""
