"""One step of a state, with a small and with a large step size Δ. For chapter 00."""

from math import exp

from cheems_ref import plotting
from cheems_ref.plotting import state_grid

BLUE, RED, GREEN, _, ORANGE, _ = plotting.COLORS
CELL = 0.4
SIDE = 4 * CELL
OLD, WRITTEN, NEW, READ = 3.3, 6.6, 9.4, 12.0  # where the grids begin
A = -1.0
BEFORE = [[0.9, 0.2, 0.0, 0.5], [0.1, 0.8, 0.3, 0.0], [0.6, 0.0, 0.9, 0.2], [0.0, 0.5, 0.1, 0.7]]
VALUE, KEY, QUERY = [0.9, 0.3, 0.6, 1.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]


def grid(ax, x, y, values, color=GREEN):
    state_grid(ax, x, y, values, cell=CELL, color=color, largest=1.5)


def draw_step(ax, y, dt, words):
    """A row of the picture: what is left of the old state, what is written, and their sum."""
    middle = y + SIDE / 2
    kept = exp(dt * A)
    written = [[v * k for k in KEY] for v in VALUE]
    new = [
        [kept * old + dt * add for old, add in zip(*rows, strict=True)]
        for rows in zip(BEFORE, written, strict=True)
    ]
    read = [[sum(entry * c for entry, c in zip(row, QUERY, strict=True))] for row in new]
    font = dict(va="center", ha="center", fontsize=22)
    ax.text(0.0, middle, words, va="center", fontsize=21)
    grid(ax, OLD, y, BEFORE)
    ax.text(OLD - 0.05, middle, f"{kept:.2f} ×", va="center", ha="right", fontsize=22, color=GREEN)
    ax.text((OLD + SIDE + WRITTEN) / 2 - 0.05, middle, f"+  {dt:.1f} ×", color=ORANGE, **font)
    grid(ax, WRITTEN, y, written, ORANGE)
    ax.text((WRITTEN + SIDE + NEW) / 2, middle, "=", **font)
    grid(ax, NEW, y, new)
    plotting.arrow(ax, (NEW + SIDE + 0.08, middle), (READ - 0.08, middle), color=RED)
    grid(ax, READ, y, read, RED)


def draw_names(ax):
    places = {"$h_{t-1}$": (OLD + SIDE / 2, GREEN), "$x_t B_t^\\top$": (WRITTEN + SIDE / 2, ORANGE)}
    places |= {"$h_t$": (NEW + SIDE / 2, GREEN), "$y_t = h_t C_t$": (READ + CELL / 2, RED)}
    for name, (x, color) in places.items():
        ax.text(x, 4.25, name, ha="center", fontsize=22, color=color)


def draw():
    fig, ax = plotting.canvas(13.0, 4.7)
    draw_names(ax)
    draw_step(ax, 2.45, 0.2, "a small\nstep:\nΔ = 0.2")
    large = 0.15, 1.5, "a large\nstep:\nΔ = 1.5"
    return fig, plotting.in_stages(ax, lambda ax: draw_step(ax, *large))
