"""What a run writes down of itself, as types and as lines of its files, and what its lines come to; and the phases of a
step, which are only told."""
