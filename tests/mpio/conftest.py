"""Leaves these tests out where h5py has no MPI; `make test-mpio` builds one that has."""

from __future__ import annotations


def _has_mpi() -> bool:
    import mpi4py

    # An h5py with MPI loads it, which would start it: only the ranks that tests launch are to.
    mpi4py.rc.initialize = False
    import h5py

    return bool(h5py.get_config().mpi)


collect_ignore_glob = [] if _has_mpi() else ["test_*.py"]
