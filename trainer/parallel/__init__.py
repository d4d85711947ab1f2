"""Groups, collectives and keyed randomness: what the ranks of a mesh share."""
