"""A head with its value path cut open: the opening drawing of chapter 05."""

import torch
from matplotlib.patches import Rectangle

from cheems_ref import plotting
from cheems_ref.attention import causal_mask


def draw_weights(ax, x, y):
    """A triangle of weights, its lower left corner at (x, y), and a shutter on one column."""
    drawn = dict(generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = 1.2 * torch.randn(6, 6, **drawn).masked_fill(~causal_mask(6, 6), -99)
    shades = (0.15 + 0.8 * scores.softmax(1)) * causal_mask(6, 6)
    columns, rows = ([start + step * i for i in range(7)] for start, step in ((x, 0.45), (y, 0.36)))
    ax.pcolormesh(columns, rows, shades.flip(0).numpy(), cmap="Blues", vmin=0, vmax=1, ec="#cccccc")
    red, corner = plotting.COLORS[1], (x + 0.45, y - 0.15)
    ax.add_patch(Rectangle(corner, 0.45, 2.46, fc=red, ec=red, alpha=0.5, hatch="--"))
    ax.text(x + 1.35, y + 2.42, "weights: row = reader, column = key", ha="center", fontsize=14)
    ax.text(x + 0.6, y - 0.22, "a shutter dims one key", color=red, va="top", fontsize=14)


def draw_values(ax, y):
    """The cut in the value path, and three things that fit into it."""
    inner = {"$Wx_s$": "this token,\none matrix", "SSD$(x)_s$": "all tokens\nup to $s$"}
    inner["$x_s$ times rows"] = "rows looked up\nfor this token"
    for x, (name, knows) in zip((3.6, 5.7, 8.0), inner.items(), strict=True):
        plotting.box(ax, x, y, name, color=plotting.COLORS[2], fontsize=16)
        ax.text(x, y - 0.45, knows, ha="center", va="top", fontsize=13)
    frame = dict(fc="none", ec=plotting.COLORS[2], lw=2, ls="--")
    ax.add_patch(Rectangle((2.45, y - 1.05), 6.95, 1.85, **frame))
    ax.text(2.6, y + 0.45, "values: put one of these in", fontsize=14, color=plotting.COLORS[2])


def draw_paths(ax):
    """The boxes around weights and values, and the paths between them."""
    for x, y, text in ((0.9, 2.9, "$x$"), (3.3, 4.6, "queries"), (3.3, 3.5, "keys")):
        plotting.box(ax, x, y, text, fontsize=17)
    plotting.box(ax, 11.1, 2.9, r"$y_t = \sum_s w_{ts}\,v_s$", fontsize=17)
    ends = ((1.2, 3.1), (2.5, 4.5)), ((1.25, 2.95), (2.75, 3.45)), ((1.2, 2.7), (2.4, 1.5))
    ends += ((4.15, 4.6), (5.5, 4.3)), ((3.9, 3.5), (5.5, 3.7))
    ends += ((8.4, 3.9), (9.7, 3.2)), ((9.45, 1.4), (10.4, 2.4))
    for start, end in ends:
        plotting.arrow(ax, start, end)


def draw():
    fig, ax = plotting.canvas(12.4, 5.6)
    draw_weights(ax, 5.6, 2.85)
    draw_values(ax, 1.25)
    draw_paths(ax)
    return fig, []
