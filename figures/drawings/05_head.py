"""A head with its value path cut open: the opening drawing of chapter 05."""

import torch
from matplotlib.patches import Rectangle

from cheems_ref import plotting
from cheems_ref.attention import causal_mask

CELL = 0.4
BLUE, RED, GREEN = plotting.COLORS[0], plotting.COLORS[1], plotting.COLORS[2]


def draw_weights(ax, x, y, dimmed=1):
    """A triangle of weights, its lower left corner at (x, y), and a shutter on one column."""
    drawn = dict(generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = 1.2 * torch.randn(6, 6, **drawn).masked_fill(~causal_mask(6, 6), -99)
    scores[:, dimmed] -= 4.0
    weights = scores.softmax(1)
    shades = ((0.15 + 0.85 * weights) * causal_mask(6, 6)).tolist()
    plotting.state_grid(ax, x, y, shades, cell=CELL, color=BLUE, largest=1.0)
    frame = dict(fc="none", ec=RED, lw=3, zorder=3)
    height = CELL * (6 - dimmed)
    ax.add_patch(Rectangle((x + CELL * dimmed, y), CELL, height, **frame))
    words = "weights: row t reads column s"
    ax.text(x + 3 * CELL, y + 6 * CELL + 0.15, words, ha="center", fontsize=16, color=BLUE)
    ax.text(x + 0.2, y - 0.08, "a shutter dims one key", va="top", fontsize=16, color=RED)


def draw_values(ax, x, y):
    """The cut in the value path, and three things that fit into it."""
    ax.text(x + 3.6, y + 1.6, "values: put one of these in", fontsize=17, color=GREEN, ha="center")
    inner = {"$Wx_s$": "this token,\none matrix", "SSD$(x)_s$": "all tokens\nup to s"}
    inner["$x_s$ × rows"] = "rows looked up\nfor this token"
    for place, (name, knows) in zip((1.0, 3.35, 5.9), inner.items(), strict=True):
        plotting.box(ax, x + place, y + 0.95, name, color=GREEN, fontsize=18)
        ax.text(x + place, y + 0.5, knows, ha="center", va="top", fontsize=15)
    frame = dict(fc="none", ec=GREEN, lw=2, ls="--")
    ax.add_patch(Rectangle((x, y - 0.3), 7.15, 1.75, **frame))


def draw_paths(ax):
    """The boxes around weights and values, and the paths between them."""
    plotting.box(ax, 0.6, 3.0, "$x$", fontsize=20)
    plotting.box(ax, 2.9, 4.6, "queries", fontsize=17)
    plotting.box(ax, 2.9, 3.3, "keys", fontsize=17)
    plotting.box(ax, 10.9, 3.0, r"$y_t = \sum_s w_{ts}\,v_s$", fontsize=20)
    ends = ((0.85, 3.2), (2.25, 4.35)), ((0.85, 3.05), (2.4, 3.25)), ((0.75, 2.65), (1.8, 1.5))
    ends += ((3.55, 4.6), (5.75, 4.35)), ((3.3, 3.3), (5.75, 3.6))
    ends += ((8.15, 4.0), (9.95, 3.3)), ((8.95, 1.5), (10.4, 2.6))
    for start, end in ends:
        plotting.arrow(ax, start, end)


def draw():
    fig, ax = plotting.canvas(12.4, 5.7)
    draw_weights(ax, 5.75, 2.75)
    draw_values(ax, 1.8, 0.4)
    draw_paths(ax)
    return fig, []
