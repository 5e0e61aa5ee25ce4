"""An executable reference for Cheems / Wonderful Matrices: one module per notebook."""

from cheems_ref.kernels import prepare_environment

__version__ = "0.1.0"

prepare_environment()  # before any other import: Triton reads its settings when first imported
