"""The protocols, pure: no MPI, no threads, no clock, no files, no torch.

Events go in, instructions come out, and time is an argument. Everything here can be explored
exhaustively by ``mpift.testing.explorer`` and runs unchanged inside a simulation.
"""
