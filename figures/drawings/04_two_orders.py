"""Fade and turn, in both orders: with two rates the end points differ. For chapter 04."""

import math

from cheems_ref import plotting
from cheems_ref.plotting import arrow

BLUE, RED, GREEN = plotting.COLORS[:3]
ANGLE, X = math.radians(55), (1.05, 0.3)
FADES = {"equal rates": (0.55, 0.55), "a rate for each entry": (0.9, 0.3)}


def turn(v):
    cosine, sine = math.cos(ANGLE), math.sin(ANGLE)
    return cosine * v[0] - sine * v[1], sine * v[0] + cosine * v[1]


def fade(v, rates):
    return rates[0] * v[0], rates[1] * v[1]


def draw_orders(ax, x, y, scale, rates, title):
    """The vector, and where it arrives by the two ways; the origin is at (x, y)."""

    def at(v, longer=1.0):
        return x + scale * longer * v[0], y + scale * longer * v[1]

    ax.text(x - 0.9, y + 4.0, title, fontsize=19, weight="bold", va="center")
    ax.plot([x - 0.9, x + 3.9], [y, y], color=plotting.QUIET, lw=1)
    ax.plot([x, x], [y - 0.3, y + 3.6], color=plotting.QUIET, lw=1)
    arrow(ax, (x, y), at(X), color=plotting.INK)
    ax.text(*at(X, 1.07), "$x$", fontsize=20, va="center")
    ways = (
        ("turn, then fade", turn(X), fade(turn(X), rates), BLUE, 3.35),
        ("fade, then turn", fade(X, rates), turn(fade(X, rates)), RED, 2.85),
    )
    for words, between, end, color, up in ways:
        for start, stop in ((X, between), (between, end)):
            style = dict(arrowstyle="-|>", color=color, lw=2.2, mutation_scale=18, linestyle="--")
            ax.annotate("", at(stop), at(start), arrowprops=style)
        ax.text(x + 2.0, y + up, words, fontsize=18, color=color, va="center")
    ends = [at(end) for _, _, end, _, _ in ways]
    together = math.dist(*ends) < 1e-9
    for end, color in zip(ends, (BLUE, RED), strict=True):
        ax.plot(*end, "o", color=GREEN if together else color, markersize=16, zorder=3)


def draw():
    fig, ax = plotting.canvas(13.2, 5.0)
    (one, equal), (two, unequal) = FADES.items()
    draw_orders(ax, 1.5, 0.5, 3.1, equal, one)
    drawn = set(ax.get_children())
    draw_orders(ax, 8.1, 0.5, 3.1, unequal, two)
    return fig, [[artist for artist in ax.get_children() if artist not in drawn]]
