"""A turned vector in two steps: along the vector, then along its quarter turn. For chapter 04."""

import math

from cheems_ref import plotting
from cheems_ref.plotting import arrow

BLUE, RED, GREEN, _, ORANGE, _ = plotting.COLORS
ANGLE, AHEAD, LONG = math.radians(20), math.radians(50), 4.2  # of x, of the turn, and x's length
ORIGIN = (4.8, 0.4)


def place(along, across):
    """A point so far along x and so far along its quarter turn, in units of x."""
    x = LONG * (along * math.cos(ANGLE) - across * math.sin(ANGLE))
    y = LONG * (along * math.sin(ANGLE) + across * math.cos(ANGLE))
    return ORIGIN[0] + x, ORIGIN[1] + y


def draw_arc(ax, start, end, radius, name, color):
    """An angle at the origin, with its name."""
    steps = [start + (end - start) * i / 40 for i in range(41)]
    points = [(ORIGIN[0] + radius * math.cos(a), ORIGIN[1] + radius * math.sin(a)) for a in steps]
    ax.plot(*zip(*points, strict=True), color=color, lw=2)
    middle = steps[20]
    at = (
        ORIGIN[0] + (radius + 0.3) * math.cos(middle),
        ORIGIN[1] + (radius + 0.3) * math.sin(middle),
    )
    ax.text(*at, name, ha="center", va="center", fontsize=20, color=color)


def draw():
    fig, ax = plotting.canvas(12, 5.2)
    turned = place(math.cos(AHEAD), math.sin(AHEAD))
    corner = place(math.cos(AHEAD), 0)
    arrow(ax, ORIGIN, place(1, 0), color=plotting.QUIET)
    arrow(ax, ORIGIN, place(0, 1), color=plotting.QUIET)
    ax.text(*place(1.05, -0.02), "$x$", fontsize=22, va="center")
    ax.text(*place(0.06, 1.08), "$x$, a quarter turn ahead", fontsize=18, ha="right", va="center")
    stages = []
    for start, end, color, words, at, side in (
        (ORIGIN, corner, BLUE, r"$\cos\varphi \cdot x$", place(0.36, -0.13), "left"),
        (corner, turned, ORANGE, r"$\sin\varphi \cdot$ quarter turn", place(0.69, 0.42), "left"),
        (ORIGIN, turned, RED, r"$R(\varphi)\,x$", place(0.64, 0.86), "center"),
    ):
        drawn = set(ax.get_children())
        style = dict(arrowstyle="-|>", color=color, lw=4, mutation_scale=26, shrinkA=0, shrinkB=0)
        ax.annotate("", end, start, arrowprops=style)
        ax.text(*at, words, fontsize=20, color=color, ha=side, va="center")
        stages.append([artist for artist in ax.get_children() if artist not in drawn])
    drawn = set(ax.get_children())
    draw_arc(ax, ANGLE, ANGLE + AHEAD, 0.9, r"$\varphi$", plotting.INK)
    stages[-1] += [artist for artist in ax.get_children() if artist not in drawn]
    return fig, stages
