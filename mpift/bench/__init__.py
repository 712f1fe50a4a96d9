"""Benchmarks that a user runs on the machine in question, peers measured in the same run.

Machines vary by a quarter from one minute to the next, so a number alone says little. Everything
here is measured in alternation with what it is compared to, on the same ranks, and comes with its
quartiles and the number of runs.
"""
