"""An executable reference for Cheems / Wonderful Matrices: one module per notebook."""

__version__ = "0.1.0"
