"""Serve programs with a loop of their own: they pass observations, and get the actions of agents and people.

A `Game` is the program's end. `handover` is the queue between the program's thread and the server's. Neither thread
waits there for the other, unless the program asks to wait. `process` carries the same data to another process. To a
world the program is an `environment`: a step completes when the program calls `exchange` again. `clock` and
`lock_step` are the pacers; `clock` counts the program's `frames`. `source` makes the world.

May be imported by the composition root.
"""
