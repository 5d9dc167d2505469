"""What was done with the library: the papers' claims, comparisons, a cost model."""
