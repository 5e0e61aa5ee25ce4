"""Two tokens, a table: each picks two rows, and multiplies itself by their mix. For chapter 00."""

import torch

from cheems_ref import plotting
from cheems_ref.plotting import arrow, state_grid

BLUE, RED, GREEN, _, ORANGE, _ = plotting.COLORS
CELL, WIDE, ROWS = 0.36, 6, 7
TABLE, FACTORS, VALUE = 3.7, 7.2, 10.6  # where they begin


def numbers():
    """Two tokens, keys and rows of a table; the rows that each token picks, and their weights."""
    drawn = dict(generator=torch.Generator().manual_seed(204), dtype=torch.float64)
    tokens, table = 0.2 + 0.8 * torch.rand(2, WIDE, **drawn), torch.rand(ROWS, WIDE, **drawn)
    best, rows = torch.randn(2, ROWS, **drawn).topk(2)
    return tokens, table, rows, best.softmax(-1)


def height(row):
    return 3.7 - 0.57 * row


def strip(ax, x, y, values, color):
    state_grid(ax, x, y, [values.tolist()], cell=CELL, color=color, largest=1.0)


def draw_token(ax, y, token, table, rows, weights, name):
    """What one token picks, the factors it gets, and its value."""
    strip(ax, 0.1, y, token, BLUE)
    ax.text(0.1, y + CELL + 0.15, f"{name} $x$", fontsize=20, color=BLUE)
    for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
        there = height(row) + CELL / 2
        arrow(ax, (0.15 + WIDE * CELL, y + CELL / 2), (TABLE - 0.05, there), color=RED)
        start, end = (TABLE + WIDE * CELL + 0.05, there), (FACTORS - 0.05, y + CELL / 2)
        arrow(ax, start, end, color=ORANGE)
        side = 1 if end[1] < there else -1  # above an arrow that falls, below one that rises
        ax.text(
            start[0], there + 0.2 * side, f"{weight:.2f}", va="center", fontsize=17, color=ORANGE
        )
    factors = weights @ table[rows]
    strip(ax, FACTORS, y, factors, ORANGE)
    ax.text(FACTORS, y + CELL + 0.15, "its factors", fontsize=20, color=ORANGE)
    ax.text((FACTORS + WIDE * CELL + VALUE) / 2, y + CELL / 2, r"$\circ\;x\;=$", fontsize=22,
            ha="center", va="center")  # fmt: skip
    strip(ax, VALUE, y, token * factors, GREEN)
    ax.text(VALUE, y + CELL + 0.15, "its value $v$", fontsize=20, color=GREEN)


def draw():
    fig, ax = plotting.canvas(12.9, 4.5)
    tokens, table, rows, weights = numbers()
    for row in range(ROWS):
        strip(ax, TABLE, height(row), table[row], ORANGE)
    ax.text(TABLE, height(0) + CELL + 0.12, "the table: $U_j$", fontsize=20, color=ORANGE)
    draw_token(ax, 2.7, tokens[0], table, rows[0], weights[0], "a token")
    another = 0.5, tokens[1], table, rows[1], weights[1], "another"
    return fig, plotting.in_stages(ax, lambda ax: draw_token(ax, *another))
