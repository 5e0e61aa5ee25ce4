"""A head with its value path cut open: the opening drawing of chapter 05."""

import torch
from matplotlib.patches import Rectangle

from cheems_ref import plotting
from cheems_ref.attention import causal_mask

CELL = 0.4
BLUE, RED, GREEN = plotting.COLORS[0], plotting.COLORS[1], plotting.COLORS[2]
LEFT, RIGHT, PATH = 1.85, 9.15, 1.35  # where the value path is cut, and its height


def draw_weights(ax, x, y, dimmed=None):
    """A triangle of weights, its lower left corner at (x, y), one column of it nearly white."""
    drawn = dict(generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = 1.2 * torch.randn(6, 6, **drawn).masked_fill(~causal_mask(6, 6), -99)
    if dimmed is not None:
        scores[:, dimmed] -= 4.0
    weights = scores.softmax(1)
    shades = ((0.05 + 0.95 * weights) * causal_mask(6, 6)).tolist()
    ax.add_patch(Rectangle((x, y), 6 * CELL, 6 * CELL, fc="white", ec="none"))
    plotting.state_grid(ax, x, y, shades, cell=CELL, color=BLUE, largest=1.0)


def draw_name(ax, x, y):
    """What the triangle is."""
    words = "weights: row t reads column s"
    ax.text(x + 3 * CELL, y + 6 * CELL + 0.15, words, ha="center", fontsize=16, color=BLUE)


def draw_shutter(ax, x, y, dimmed=1):
    """The weights with one key dimmed, and a frame around its column."""
    draw_weights(ax, x, y, dimmed)
    frame = dict(fc="none", ec=RED, lw=3, zorder=3)
    ax.add_patch(Rectangle((x + CELL * dimmed, y), CELL, CELL * (6 - dimmed), **frame))
    ax.text(x + 0.2, y - 0.1, "a shutter dims one key", va="top", fontsize=16, color=RED)


def draw_paths(ax):
    """An ordinary head: queries, keys and values, and the paths between them."""
    plotting.box(ax, 0.6, 3.0, "$x$", fontsize=20)
    plotting.box(ax, 2.9, 4.6, "queries", fontsize=17)
    plotting.box(ax, 2.9, 3.3, "keys", fontsize=17)
    plotting.box(ax, 10.9, 3.0, r"$y_t = \sum_s w_{ts}\,v_s$", fontsize=20)
    ends = ((0.85, 3.2), (2.25, 4.35)), ((0.85, 3.05), (2.4, 3.25))
    ends += ((3.55, 4.6), (5.75, 4.35)), ((3.3, 3.3), (5.75, 3.6)), ((8.15, 4.0), (9.95, 3.3))
    for start, end in ends:
        plotting.arrow(ax, start, end)
    ax.plot([0.7, LEFT - 0.65, RIGHT + 0.65], [2.6, PATH, PATH], color=GREEN, lw=3, zorder=0)
    plotting.arrow(ax, (RIGHT + 0.6, PATH), (10.6, 2.55), color=GREEN)
    draw_value(ax, 3.2, "$Wx_s$", "this token,\none matrix")


def draw_value(ax, x, name, knows):
    """One value, and what it knows."""
    plotting.box(ax, x, PATH, name, color=GREEN, fontsize=18)
    ax.text(x, PATH - 0.42, knows, ha="center", va="top", fontsize=16)


def draw_cut(ax):
    """The gap in the value path, its two ends, and two more things that fit into it."""
    gap = dict(fc="white", ec="none", zorder=1)
    ax.add_patch(Rectangle((LEFT, PATH - 0.1), RIGHT - LEFT, 0.2, **gap))
    for x in (LEFT, RIGHT):
        ax.plot([x - 0.1, x + 0.1], [PATH - 0.38, PATH + 0.38], color=GREEN, lw=4)
    words = "values: the path is cut, and any of these closes it"
    ax.text((LEFT + RIGHT) / 2, PATH + 0.58, words, ha="center", fontsize=16, color=GREEN)
    draw_value(ax, 5.4, "SSD$(x)_s$", "all tokens\nup to s")
    draw_value(ax, 7.75, r"$x_s \circ$ rows", "rows looked up\nfor this token")


def draw():
    fig, ax = plotting.canvas(12.6, 5.7)
    draw_weights(ax, 5.75, 2.85)
    draw_name(ax, 5.75, 2.85)
    draw_paths(ax)
    return fig, plotting.in_stages(ax, lambda ax: draw_shutter(ax, 5.75, 2.85), draw_cut)
