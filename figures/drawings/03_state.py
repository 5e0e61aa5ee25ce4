"""Equation 3.4 as grids: the state fades, a token writes into it, a query reads it. Chapter 03."""

from cheems_ref import plotting
from cheems_ref.plotting import arrow, state_grid

BLUE, READ, GREEN, _, WRITE, _ = plotting.COLORS
CELL, FADE = 0.5, 0.6  # of a grid with p = 3 rows and n = 4 columns
WIDE, HIGH, LOW = 4 * CELL, 3 * CELL, 0.9
STATE = [[0.9, 0.2, 0.5, 0.1], [0.3, 0.8, 0.2, 0.6], [0.7, 0.1, 0.9, 0.4]]
VALUE, KEY, QUERY = [0.9, 0.3, 0.6], [0.1, 1.0, 0.3, 0.7], [0.2, 0.9, 0.1, 0.6]


def grid(ax, x, values, color, name):
    """A grid with its lower left corner at (x, LOW) and its name below."""
    state_grid(ax, x, LOW, values, cell=CELL, color=color, largest=1.2)
    middle = x + CELL * len(values[0]) / 2
    ax.text(middle, LOW - 0.5, name, ha="center", fontsize=20, color=plotting.INK)


def sign(ax, x, text):
    ax.text(x, LOW + HIGH / 2, text, ha="center", va="center", fontsize=24)


def draw_write(ax, x):
    """A key above and a value at the left: each entry is the product of one of each."""
    written = [[v * k for k in KEY] for v in VALUE]
    state_grid(ax, x, LOW + HIGH + 0.12, [KEY], cell=CELL, color=BLUE, largest=1.2)
    ax.text(x + WIDE + 0.1, LOW + HIGH + 0.22, "key $B_t$", fontsize=18, color=BLUE)
    column = [[v] for v in VALUE]
    state_grid(ax, x - CELL - 0.12, LOW, column, cell=CELL, color=BLUE, largest=1.2)
    ax.text(x - 0.12, LOW + HIGH + 0.75, "value $x_t$", ha="right", fontsize=18, color=BLUE)
    arrow(ax, (x - 0.37, LOW + HIGH + 0.68), (x - 0.37, LOW + HIGH + 0.06), color=BLUE)
    grid(ax, x, written, WRITE, r"$\Delta_t\, x_t B_t^\top$")
    return written


def draw():
    fig, ax = plotting.canvas(13.25, 3.9)
    ax.text(0.1, LOW + HIGH / 2, r"$e^{\Delta_t A}$ ·", va="center", fontsize=20)
    grid(ax, 1.05, STATE, GREEN, "$h_{t-1}$")
    sign(ax, 3.35, "+")
    written = draw_write(ax, 4.3)
    sign(ax, 6.65, "=")
    new = [
        [FADE * old + added for old, added in zip(*rows, strict=True)]
        for rows in zip(STATE, written, strict=True)
    ]
    grid(ax, 7.0, new, GREEN, "$h_t$")

    drawn = set(ax.get_children())
    x = 10.9
    arrow(ax, (7.0 + WIDE + 0.15, LOW + HIGH / 2), (x - 0.15, LOW + HIGH / 2), color=READ)
    ax.text(9.95, LOW + HIGH / 2 + 0.15, "read", ha="center", fontsize=18, color=READ)
    state_grid(ax, 9.95 - WIDE / 2, LOW + HIGH + 0.6, [QUERY], cell=CELL, color=READ, largest=1.2)
    ax.text(9.95, LOW + HIGH + 1.2, "query $C_t$", ha="center", fontsize=18, color=READ)
    output = [[sum(h * q for h, q in zip(row, QUERY, strict=True)) / 2] for row in new]
    grid(ax, x, output, READ, "$y_t = h_t C_t$")
    return fig, [[artist for artist in ax.get_children() if artist not in drawn]]
