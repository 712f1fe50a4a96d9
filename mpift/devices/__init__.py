"""The hardware: moving tensors to and from host memory, and probing how much of it is in use.

``tensors`` loads torch; ``probes``, ``accelerators`` and ``cgroups`` never do.
"""
