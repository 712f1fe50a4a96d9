"""The test kit, shipped for users' own tests: ranks under a real mpirun (``ranks``), a virtual
cluster of nodes that can be cut off and lost (``cluster``), and a state-space explorer
(``explorer``).
"""
