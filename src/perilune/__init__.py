"""Perilune: K3-class models, whole or by the piece.

Nothing is imported here, so that `import perilune` and the command line start at once.  Look into
`perilune.ops` (functions), `perilune.nn` (modules), `perilune.models.k3`, `perilune.optim`.
"""

__version__ = "0.1.0"
