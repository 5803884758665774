"""A slow, naive, obviously right model of the manager: all kinds of groups, both semantics.

It was written from the specification alone. Blocks are plain ints (0 is the null block), tables are
plain lists of ints, the free queue is a plain list (head first), the prefix map is a dict from key
to the ids that carry it. Nothing is optimised, and misuse is not modelled: callers keep the
contract. Comments such as `manager 2.2` and `groups 2.3` name the section of the specification that
a rule is from.

Reading order: `hashing`, `pool`, `groups`, `sparse_groups`, `mamba`, `coordinator`, `manager`,
`invariants`.
"""
