"""States of the rows of a KVPageCache, for models whose layers keep some.

RowStates   the slots that the rows have, and what becomes of them
RowPass     one forward: it reads states from slots, and writes them there when it is done
PackedPass  one forward of a view, whose runner computes in the slots
MixerHooks  let a mixer compute a forward in pieces, with a snapshot after each
"""
