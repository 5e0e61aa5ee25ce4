"""A tile of B with its masks."""

import torch

from cheems_ref import plotting

l, q = 42, 16  # tokens, and tokens in a chunk
n, N = 8, 16  # columns of B, and columns of the tile


def draw_cells(ax, left, low, kept):
    """A grid of places: dark where kept is true, row 0 on top."""
    rows, columns = ([start + 0.3 * i for i in range(size + 1)]
                     for start, size in zip((low, left), kept.shape, strict=True))  # fmt: skip
    how = dict(cmap="Blues", vmin=0, vmax=1.5, edgecolors=plotting.QUIET, linewidth=0.6)
    ax.pcolormesh(columns, rows, kept.flip(0).double(), **how)


def draw_tile(ax, inside, of_matrix):
    """A tile, its mask of rows at the left, and its mask of columns above."""
    draw_cells(ax, 4.0, 0.3, inside[:, None] & of_matrix)
    draw_cells(ax, 3.4, 0.3, inside[:, None])
    draw_cells(ax, 4.0, 5.4, of_matrix[None])
    how = dict(ha="center", va="center", fontsize=15, bbox=dict(fc="white", ec="none", pad=3))
    ax.text(2.1, 3.6, "inside: t < l\n(10 tokens)", **how)
    ax.text(5.2, 6.1, "column < n   (8 numbers)", **how)
    ax.text(5.2, 3.6, "$B$ of tokens\n32 to 41", **how)
    ax.text(7.6, 3.6, "zeros", **how)
    ax.text(5.2, 1.2, "zeros", **how)


def draw():
    fig, ax = plotting.canvas(9.2, 6.5)
    draw_tile(ax, 2 * q + torch.arange(q) < l, torch.arange(N) < n)
    return fig, []
