"""One triangular system gives the writes of four tokens, row by row. For chapter 02."""

from functools import partial

from cheems_ref import plotting
from cheems_ref.plotting import arrow, state_grid

BLUE, RED, GREEN, _, ORANGE, _ = plotting.COLORS
CELL, TOKENS, Y = 0.75, 4, 0.5
MATRIX, WRITES, RIGHT = 1.1, 5.0, 9.1  # x of the three grids
T = [[0, 0, 0, 0], [0.6, 0, 0, 0], [0.3, 0.5, 0, 0], [0.2, 0.4, 0.7, 0]]
MISSING = [[1.0, 0.2], [0.7, 1.0], [1.2, 0.6], [0.9, 1.3]]  # row t: β_t (v_t - S_before k_t)


def solved():
    """The rows of U from top to bottom, each from those above it."""
    rows = []
    for t, missing in enumerate(MISSING):
        heard = [sum(T[t][s] * rows[s][i] for s in range(t)) for i in range(2)]
        rows.append([m - h for m, h in zip(missing, heard, strict=True)])
    return rows


def draw_earlier(ax, t):
    """Row t of T: how much of each earlier write it takes away."""
    y = Y + (TOKENS - 1 - t) * CELL
    for s in range(t):
        state_grid(ax, MATRIX + s * CELL, y, [[T[t][s]]], cell=CELL, color=RED, largest=1)
        place = MATRIX + (s + 0.5) * CELL, y + CELL / 2
        ax.text(*place, f"$T_{{{t}{s}}}$", ha="center", va="center", fontsize=19)
    ax.text(WRITES - 0.15, y + CELL / 2, f"$u_{t}$", ha="right", va="center", fontsize=21)


def draw_write(ax, t, row):
    """Row t of U, and an arrow from every row above it."""
    y = Y + (TOKENS - 1 - t) * CELL
    state_grid(ax, WRITES, y, [row], cell=CELL, color=ORANGE, largest=1.3)
    for s in range(t):
        x, start = WRITES + 2 * CELL + 0.08, Y + (TOKENS - 0.65 - s) * CELL
        arrow(ax, (x, start), (x, y + CELL * (0.35 + 0.35 * (s + 1) / t)), color=ORANGE, bend=-0.6)


def draw():
    fig, ax = plotting.canvas(11.6, 4.5)
    state_grid(ax, MATRIX, Y, [[0.0] * TOKENS] * TOKENS, cell=CELL, largest=1)
    for t in range(TOKENS):
        place = MATRIX + (t + 0.5) * CELL, Y + (TOKENS - 0.5 - t) * CELL
        ax.text(*place, "1", ha="center", va="center", fontsize=20)
        ax.text(0.9, place[1], f"token {t}", ha="right", va="center", fontsize=18, color=BLUE)
    state_grid(ax, WRITES, Y, [[0.0] * 2] * TOKENS, cell=CELL, largest=1)
    for t in range(TOKENS):
        draw_earlier(ax, t)
    state_grid(ax, RIGHT, Y, MISSING, cell=CELL, color=GREEN, largest=1.3)
    ax.text(RIGHT - 0.35, Y + 2 * CELL, "=", ha="center", va="center", fontsize=26)
    top = Y + TOKENS * CELL + 0.2
    for x, wide, words in (
        (MATRIX, 4, "$I + T$:\nkeys with earlier keys"),
        (WRITES, 2, "$U$:\nthe writes"),
        (RIGHT, 2, "known:\n" + r"$\mathrm{diag}(\beta)\,(V - K S_{-1}^\top)$"),
    ):
        ax.text(x + wide * CELL / 2, top, words, ha="center", fontsize=19)
    rows = solved()
    for t in range(TOKENS):
        total = [rows[t][i] + sum(T[t][s] * rows[s][i] for s in range(t)) for i in range(2)]
        assert all(abs(a - b) < 1e-12 for a, b in zip(total, MISSING[t], strict=True))
    writes = (partial(draw_write, t=t, row=row) for t, row in enumerate(rows))
    return fig, plotting.in_stages(ax, *writes)
