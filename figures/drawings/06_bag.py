"""A bag of rows, forward and backward: weights in and a vector out, a vector in and weights out."""

from cheems_ref import plotting
from cheems_ref.plotting import arrow, state_grid

BLUE, ORANGE, RED = plotting.COLORS[0], plotting.COLORS[4], plotting.COLORS[1]
CELL, GAP = 0.5, 0.22
ROWS = [[0.9, 0.1, 0.5, 0.3], [0.2, 0.8, 0.1, 0.6], [0.4, 0.3, 0.9, 0.1]]
WEIGHTS, X = [0.8, 0.2, 0.5], [0.3, 0.9, 0.2, 0.7]
WIDE = 4 * CELL


def height(j):
    """The lower edge of row j."""
    return 3.35 - j * (CELL + GAP)


def draw_table(ax, x):
    """Three rows of a table, which both directions use."""
    for j, row in enumerate(ROWS):
        state_grid(ax, x, height(j), [row], cell=CELL, color=BLUE, largest=1.0)
        words = f"$\\mathrm{{row}}_{j + 1}$"
        ax.text(x + WIDE + 0.15, height(j) + CELL / 2, words, va="center", fontsize=18)


def draw_forward(ax, x):
    """Weights times rows, added up."""
    draw_table(ax, x)
    ax.text(x + WIDE / 2 - 0.2, 4.25, "forward: a weighted sum", ha="center", fontsize=19)
    for j, weight in enumerate(WEIGHTS):
        state_grid(ax, x - 1.6, height(j), [[weight]], cell=CELL, color=ORANGE, largest=1.0)
        name = f"$w_{j + 1}$"
        ax.text(x - 1.75, height(j) + CELL / 2, name, ha="right", va="center", fontsize=18)
        y = height(j) + CELL / 2
        arrow(ax, (x - 1.0, y), (x - 0.1, y), color=ORANGE)
    arrow(ax, (x + WIDE / 2, height(2) - 0.08), (x + WIDE / 2, 1.05), color=ORANGE)
    total = [sum(w * row[i] for w, row in zip(WEIGHTS, ROWS, strict=True)) for i in range(4)]
    state_grid(ax, x, 0.5, [total], cell=CELL, color=ORANGE, largest=1.5)
    ax.text(x + WIDE / 2, 0.4, "a vector", ha="center", va="top", fontsize=18)


def draw_backward(ax, x):
    """A vector times each row: one number per row."""
    draw_table(ax, x)
    ax.text(x + WIDE / 2 - 0.2, 4.25, "backward: inner products", ha="center", fontsize=19)
    state_grid(ax, x, 0.5, [X], cell=CELL, color=RED, largest=1.0)
    ax.text(x + WIDE / 2, 0.4, "a vector x", ha="center", va="top", fontsize=18)
    arrow(ax, (x + WIDE / 2, 1.05), (x + WIDE / 2, height(2) - 0.08), color=RED)
    for j, row in enumerate(ROWS):
        y = height(j) + CELL / 2
        arrow(ax, (x - 0.1, y), (x - 1.0, y), color=RED)
        product = sum(a * b for a, b in zip(X, row, strict=True))
        state_grid(ax, x - 1.6, height(j), [[product]], cell=CELL, color=RED, largest=1.5)
        name = f"$\\langle x,\\mathrm{{row}}_{j + 1}\\rangle$"
        ax.text(x - 1.75, y, name, ha="right", va="center", fontsize=18)


def draw():
    fig, ax = plotting.canvas(12.4, 4.7)
    draw_forward(ax, 2.7)
    return fig, plotting.in_stages(ax, lambda ax: draw_backward(ax, 9.2))
