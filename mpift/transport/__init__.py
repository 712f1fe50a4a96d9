"""MPI: start-up, the communicators and their rebuild, and the one thread that may enter MPI."""
