"""A value from a table in five steps: scores, the best two, weights, their sum, times the token."""

import math

import torch
from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, RED, GREEN, ORANGE = (plotting.COLORS[i] for i in (0, 1, 2, 4))
CELL, ROWS, WIDE, KEY = 0.27, 6, 8, 4  # the rows of the table, the widths of a row and of a key
KEYS, SCORES, TABLE, RIGHT = 3.6, 5.35, 7.95, 11.05  # where they begin


def numbers():
    """A token, its query, keys, scores, and the rows of a table."""
    drawn = dict(generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    token, table = torch.rand(WIDE, **drawn), torch.rand(ROWS, WIDE, **drawn)
    query, keys = 2 * torch.rand(KEY, **drawn), 2 * torch.rand(ROWS, KEY, **drawn)
    return token, query, keys, keys @ query / math.sqrt(KEY), table


def height(row):
    """The lower edge of a row of the table."""
    return 3.75 - 0.66 * row


def strip(ax, x, y, values, color, largest=1.0):
    """A vector as a row of cells, its left end at (x, y)."""
    plotting.state_grid(ax, x, y, [values.tolist()], cell=CELL, color=color, largest=largest)


def draw_start(ax, token, query, keys, table):
    """Token and query, and the table with its keys."""
    strip(ax, 0.1, 3.2, token, BLUE)
    ax.text(0.1, 3.6, "token $x_s$", fontsize=19)
    strip(ax, 0.1, 1.5, query, RED, largest=2.0)
    ax.text(0.1, 1.05, "its query $W_q x_s$", fontsize=19)
    plotting.arrow(ax, (0.64, 3.15), (0.64, 1.85))
    ax.text(KEYS, 4.2, "keys", fontsize=19), ax.text(TABLE, 4.2, "rows of the table", fontsize=19)
    for row in range(ROWS):
        strip(ax, KEYS, height(row), keys[row], BLUE, largest=2.0)
        strip(ax, TABLE, height(row), table[row], ORANGE)


def draw_scores(ax, scores):
    """Step 1: the inner products of the query with the keys."""
    ax.text(SCORES - 0.1, 4.2, "① scores", fontsize=19)
    plotting.arrow(ax, (1.3, 1.7), (KEYS - 0.15, 2.2), color=RED)
    for row, score in enumerate(scores.tolist()):
        ax.text(SCORES, height(row) + CELL / 2, f"{score:.1f}", va="center", fontsize=19)


def draw_best(ax, best):
    """Step 2: frames around the two largest scores."""
    ax.text(SCORES - 0.1, 0.0, "② the best two", fontsize=19)
    for row in best:
        place = (SCORES - 0.1, height(row) - 0.12)
        ax.add_patch(Rectangle(place, 0.68, 0.5, fill=False, ec=RED, lw=3))


def draw_weights(ax, best, weights):
    """Step 3: the softmax of the two scores."""
    ax.text(SCORES + 1.15, 4.2, "③ weights", fontsize=19)
    for row, weight in zip(best, weights.tolist(), strict=True):
        words = dict(va="center", fontsize=19, weight="bold", color=RED)
        ax.text(SCORES + 1.15, height(row) + CELL / 2, f"{weight:.2f}", **words)


def draw_sum(ax, best, total):
    """Step 4: each weight multiplies its row, and the two add up to one."""
    ax.text(RIGHT, 3.15, "④ their\nweighted sum", fontsize=19)
    for row in best:
        y = height(row) + CELL / 2
        plotting.arrow(ax, (SCORES + 1.85, y), (TABLE - 0.08, y), color=RED)
        start = (TABLE + WIDE * CELL + 0.08, y)
        plotting.arrow(ax, start, (RIGHT - 0.08, 2.9), color=ORANGE)
    strip(ax, RIGHT, 2.75, total, ORANGE)


def draw_value(ax, value):
    """Step 5: times the token, component by component."""
    ax.text(RIGHT, 0.65, "⑤ the value $v_s$:\ntimes the token", fontsize=19, va="top")
    plotting.arrow(ax, (RIGHT + 1.08, 2.7), (RIGHT + 1.08, 1.4), color=GREEN)
    ax.text(RIGHT + 1.2, 2.05, r"$\circ\;x_s$", va="center", fontsize=21)
    strip(ax, RIGHT, 1.07, value, GREEN)


def draw():
    fig, ax = plotting.canvas(13.3, 4.7)
    token, query, keys, scores, table = numbers()
    best = scores.topk(2).indices.tolist()
    weights = scores[best].softmax(0)
    total = weights @ table[best]
    draw_start(ax, token, query, keys, table)
    return fig, plotting.in_stages(
        ax,
        lambda ax: draw_scores(ax, scores),
        lambda ax: draw_best(ax, best),
        lambda ax: draw_weights(ax, best, weights),
        lambda ax: draw_sum(ax, best, total),
        lambda ax: draw_value(ax, token * total),
    )
