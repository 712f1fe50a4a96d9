"""The test kit, shipped for users' own tests: state-space explorer, ranks under a real mpirun."""
