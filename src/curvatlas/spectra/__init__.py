"""What the spectrum of a linear operator looks like, through products alone.

Eigenpairs, density, trace, norms, diagonals, functions, solves and Newton steps; every number with
an interval, every long estimate resumable.
"""
