"""Tests of checkpoints in one shared file, written through parallel HDF5: `make test-mpio`."""
