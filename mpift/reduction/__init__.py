"""Reductions on lanes: flat gradient buckets, and collectives on numpy arrays."""
