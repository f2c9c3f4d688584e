"""Rules and entries of families that share little with others."""
