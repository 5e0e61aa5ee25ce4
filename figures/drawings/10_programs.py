"""The blocks of M, with the programs that make them."""

import torch

from cheems_ref import plotting

l, q = 42, 16  # tokens, and tokens in a chunk


def draw_programs(ax):
    """The blocks of M, with the programs that stand for each."""
    chunk = torch.arange(l) // q
    made = torch.where(chunk[:, None] == chunk, 1.0, 0.35)
    made[~torch.ones(l, l).tril().bool()] = torch.nan
    plotting.heatmap(ax, made, signed=False, colorbar=False, xlabel="source", ylabel="target")
    for i in range(3):
        middle = (q * i + min(q * (i + 1), l)) / 2
        ax.text(q * i + 0.5, middle + 3, f"read {i}", color="white", fontsize=14)
        for j in range(i):
            words = f"write {j}, carry,\nread {i}"
            ax.text(q * (j + 0.5), middle, words, ha="center", va="center", fontsize=14)


def draw():
    fig, ax = plotting.figure(size=(6.4, 5.6))
    draw_programs(ax)
    return fig, []
