"""The protocol: the grammar of datagrams, the texts in their fields, our profile, and the pre-shared key.

May be imported by `perlert` and the composition root.
"""
