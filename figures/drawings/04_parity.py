"""A mirror, half a turn and a decay count the ones: only two of them change a sign. Chapter 04."""

import math

from cheems_ref import plotting
from cheems_ref.plotting import arrow

RED, GREEN = plotting.COLORS[1], plotting.COLORS[2]
BITS = [1, 1, 0, 1]
LEFT, STEP, REACH = 4.3, 2.05, 0.75  # x of the first state, of the next; half a number line
ROWS = {"a mirror per 1": 3.55, "half a turn per 1": 2.1, "a decay per 1": 0.75}
DECAY = 0.5


def column(t):
    """Where the state after t bits stands."""
    return LEFT + t * STEP


def draw_line(ax, x, y):
    """A number line from -1 to 1, with a tick at 0."""
    ax.plot([x - REACH, x + REACH], [y, y], color=plotting.QUIET, lw=1.5)
    ax.plot([x, x], [y - 0.12, y + 0.12], color=plotting.QUIET, lw=1.5)


def draw_dot(ax, x, y, value, color):
    ax.plot([x + REACH * value], [y], "o", color=color, markersize=17)


def draw_mirror(ax, x, y, t):
    """The state is 1 or -1; a one mirrors it at 0."""
    draw_line(ax, x, y)
    draw_dot(ax, x, y, (-1) ** sum(BITS[:t]), GREEN)
    if t and BITS[t - 1]:
        ax.plot([x, x], [y - 0.45, y + 0.45], color=plotting.COLORS[3], lw=2.5, linestyle="--")


def draw_turn(ax, x, y, t):
    """The state is a point of the circle; a one turns it by half a turn."""
    ring = [2 * math.pi * i / 60 for i in range(61)]
    radius = 0.55
    ax.plot([x + radius * math.cos(a) for a in ring], [y + radius * math.sin(a) for a in ring],
            color=plotting.QUIET, lw=1.5)  # fmt: skip
    now = (-1) ** sum(BITS[:t])
    if t and BITS[t - 1]:
        arrow(ax, (x - 0.4 * now, y), (x + 0.4 * now, y), color=plotting.COLORS[3], bend=0.5)
    ax.plot([x + radius * now], [y], "o", color=GREEN, markersize=17)


def draw_decay(ax, x, y, t):
    """A one brings the state closer to 0, and never past it."""
    draw_line(ax, x, y)
    draw_dot(ax, x, y, DECAY ** sum(BITS[:t]), RED)


def draw():
    fig, ax = plotting.canvas(13.4, 5.4)
    words = dict(ha="center", va="center", fontsize=18)
    for t in range(len(BITS) + 1):
        x, odd = column(t), sum(BITS[:t]) % 2
        ax.text(x, 4.55, "odd" if odd else "even", **words, weight="bold")
        if t:
            ax.text(x - STEP / 2, 5.05, f"{BITS[t - 1]}", **words | dict(fontsize=22))
            arrow(ax, (x - STEP / 2 - 0.35, 4.7), (x - STEP / 2 + 0.35, 4.7))
    ax.text(0.2, 5.05, "bit", va="center", fontsize=18)
    ax.text(0.2, 4.55, "ones so far", va="center", fontsize=18)
    stages = []
    for (name, y), draw_state in zip(
        ROWS.items(), (draw_mirror, draw_turn, draw_decay), strict=True
    ):
        drawn = set(ax.get_children())
        ax.text(0.2, y, name, va="center", fontsize=18)
        for t in range(len(BITS) + 1):
            draw_state(ax, column(t), y, t)
        if draw_state is draw_mirror:
            for value, name in ((-1, "−1"), (0, "0"), (1, "1")):
                ax.text(column(0) + REACH * value, y - 0.4, name, **words)
        stages.append([artist for artist in ax.get_children() if artist not in drawn])
    return fig, stages
