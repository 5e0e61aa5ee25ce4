"""Two mirrors, one after the other, are a turn: a triangle whose corners are three cards."""

import math

from matplotlib.patches import Polygon

from cheems_ref import plotting

CORNERS = [90, 210, 330]  # degrees
CARDS = "AKQ"


def point(degrees, length=1.0):
    return length * math.cos(math.radians(degrees)), length * math.sin(math.radians(degrees))


def draw_triangle(ax, x, cards, mirror, title):
    """A triangle around (x, 0) with a card at each corner, and the mirror that comes next."""
    corners = [(x + point(c)[0], point(c)[1]) for c in CORNERS]
    ax.add_patch(Polygon(corners, fc="white", ec=plotting.INK, lw=2))
    for corner, card in zip(CORNERS, cards, strict=True):
        at = point(corner, 1.3)
        color = plotting.COLORS[CARDS.index(card)]
        word = dict(ha="center", va="center", fontsize=24, weight="bold", color=color)
        ax.text(x + at[0], at[1], card, **word)
    if mirror is not None:
        (a, b), (c, d) = point(mirror, 1.06), point(mirror + 180, 1.0)
        ax.plot([x + a, x + c], [b, d], color=plotting.COLORS[3], lw=2.5, linestyle="--")
    ax.text(x, -1.75, title, ha="center", va="center", fontsize=17)


def draw():
    fig, ax = plotting.canvas(12, 3.9)
    draw_triangle(ax, 0, "AKQ", 210, "mirror 1 swaps A and Q")
    draw_triangle(ax, 4.3, "QKA", 90, "mirror 2 swaps K and A")
    draw_triangle(ax, 8.6, "QAK", None, "both: a turn by 120°")
    for x in (2.15, 6.45):
        plotting.arrow(ax, (x - 0.45, 0.1), (x + 0.45, 0.1))
    ax.set(xlim=(-1.8, 10.4), ylim=(-2.05, 2.0), aspect="equal")
    return fig, []
