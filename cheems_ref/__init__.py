"""An executable reference for Cheems / Wonderful Matrices; README.md lists its modules.

Sources are cited as WM (*Wonderful Matrices*), Ch (*Cheems*) and OTCE (*OTCE*), all by Shi et al.,
and L22, lecture 22 of CMU 10-423 on state space models and hybrids.
"""

__version__ = "0.1.0"
