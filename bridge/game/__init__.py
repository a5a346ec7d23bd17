"""Programs with a loop of their own: they hand over what they have to show, and get the actions of agents and people.

A `Game` is the program's end. `handover` is between its thread and the server's: neither waits there for the other,
unless the program wants to; and `process` carries what passes to another process. To worlds the program is an
`environment`, which is stepped when the program goes on; `clock`, which counts its `frames`, and `lock_step` are
their pacers, and `source` makes the one world.

May be imported by the composition root.
"""
