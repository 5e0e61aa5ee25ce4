"""A shared layer and retrieved neurons: beside them, before them, before them and added."""

from cheems_ref import plotting
from cheems_ref.plotting import arrow, box

BLUE, GREEN = plotting.COLORS[0], plotting.COLORS[2]
TOKEN, SHARED, NEURONS, SUM = 0.5, 1.75, 3.25, 4.5  # heights


def draw_ends(ax, x, title, *, adds):
    """A column's title, its token, and its output."""
    ax.text(x, 5.35, title, fontsize=21, ha="center", weight="bold")
    ax.text(x, TOKEN, "x", fontsize=22, ha="center", va="center", style="italic")
    ax.text(x, SUM, "+" if adds else "y", fontsize=24, ha="center", va="center")


def draw_boxes(ax, left, right):
    """The shared layer at `left`, the neurons at `right`, each a place (x, y)."""
    box(ax, *left, "$\\mathrm{FFN}^{\\mathrm{s}}$", color=GREEN, fontsize=20)
    box(ax, *right, "neurons", color=BLUE, fontsize=20)


def draw_beside(ax, x):
    draw_ends(ax, x, "beside", adds=True)
    middle = (SHARED + NEURONS) / 2
    draw_boxes(ax, (x - 1.0, middle), (x + 1.0, middle))
    for side, color in ((-1.0, GREEN), (1.0, BLUE)):
        start, end = (x + 0.15 * side, TOKEN + 0.25), (x + side, middle - 0.4)
        arrow(ax, start, end, color=plotting.QUIET)
        arrow(ax, (x + side, middle + 0.4), (x + 0.2 * side, SUM - 0.2), color=color)
    ax.text(x - 0.95, SUM - 0.55, "z", fontsize=20, ha="center", style="italic", color=GREEN)


def draw_before(ax, x, title, *, adds):
    draw_ends(ax, x, title, adds=adds)
    draw_boxes(ax, (x, SHARED), (x, NEURONS))
    arrow(ax, (x, TOKEN + 0.25), (x, SHARED - 0.4))
    arrow(ax, (x, SHARED + 0.4), (x, NEURONS - 0.4), color=GREEN)
    arrow(ax, (x, NEURONS + 0.4), (x, SUM - 0.25), color=BLUE)
    ax.text(x + 0.15, 2.5, "z", fontsize=20, va="center", style="italic", color=GREEN)
    if adds:
        ends = (x - 0.45, SHARED + 0.3), (x - 0.2, SUM - 0.1)
        arrow(ax, *ends, color=GREEN, bend=-0.65)


def draw():
    fig, ax = plotting.canvas(9.6, 5.8)
    draw_beside(ax, 1.9)
    draw_before(ax, 5.1, "before", adds=False)
    draw_before(ax, 8.0, "CDMoE", adds=True)
    return fig, []
