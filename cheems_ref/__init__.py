"""An executable reference for Cheems / Wonderful Matrices; README.md beside it lists the rooms.

Sources are cited as WM (*Wonderful Matrices*), Ch (*Cheems*) and OTCE (*OTCE*), all by Shi et al.,
and L22, lecture 22 of CMU 10-423 on state space models and hybrids.
"""

import sys

__version__ = "0.1.0"

# `python -m cheems_ref` says its first word before it loads PyTorch, and prepares by itself.
if sys.argv[:1] != ["-m"] or "cheems_ref" not in sys.orig_argv:
    from cheems_ref.kernels import prepare_environment

    prepare_environment()  # before any other import: Triton reads its settings when first imported
