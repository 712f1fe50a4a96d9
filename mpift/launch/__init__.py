"""Starting a job: hosts, the mpirun line, a guard for each rank, and the launcher's own verdict.

This file stays empty of imports: every rank's guard loads it.
"""
