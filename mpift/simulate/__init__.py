"""Clusters in simulated time: the protocols of ``mpift.core`` run unchanged on a made-up network.

Everything is seeded: the same seed gives the same story. Nothing here measures MPI.
"""
