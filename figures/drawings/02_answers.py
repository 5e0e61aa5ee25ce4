"""What two overlapping keys return, before and after a second write. For chapter 02.

A point is an answer: so much of v_0 to the right, so much of v_1 upward.
"""

from cheems_ref import plotting
from cheems_ref.plotting import arrow

BLUE, RED, GREEN, _, ORANGE, _ = plotting.COLORS
KEYS, VALUES = [(1.0, 0.0), (0.6, 0.8)], [(1.0, 0.0), (0.0, 1.0)]
SIZE = dict(fontsize=19)


def dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def moved(answer, key, written):
    """Where an answer goes when `written` is written under key 1."""
    overlap = dot(KEYS[1], key)
    return tuple(old + overlap * new for old, new in zip(answer, written, strict=True))


def draw_plane(ax):
    """The two values, and what the keys return before the second write."""
    before = [tuple(dot(KEYS[0], key) * v for v in VALUES[0]) for key in KEYS]
    for i, (x, y) in enumerate(before):
        ax.plot(x, y, "o", color=GREEN, markersize=13)
        words = f"what $k_{i}$\nreturns now"
        ax.text(x, y - 0.08, words, color=GREEN, ha="center", va="top", **SIZE)
    ax.plot(*VALUES[1], "s", color=BLUE, markersize=15)
    ax.text(0.0, 1.1, "$v_1$, wanted at $k_1$", color=BLUE, ha="center", **SIZE)
    ax.set(xlim=(-0.5, 1.75), ylim=(-0.42, 1.28), xticks=[0, 1], yticks=[0, 1])
    ax.set_xlabel("share of $v_0$", fontsize=18)
    ax.set_ylabel("share of $v_1$", fontsize=18)
    ax.tick_params(labelsize=18)
    return before


def draw_move(ax, i, start, written, color, words, place):
    """An arrow from what key i returns to what it returns after the write."""
    end = moved(start, KEYS[i], written)
    arrow(ax, start, end, color=color)
    ax.text(*place, words, color=color, va="center", **SIZE)


def draw():
    fig, ax = plotting.figure(size=(12, 5.2))
    before = draw_plane(ax)
    missing = tuple(v - old for v, old in zip(VALUES[1], before[1], strict=True))
    assert moved(before[1], KEYS[1], missing) == VALUES[1]
    added = VALUES[1]
    stages = []
    for moves in (
        [(1, missing, ORANGE, "what is missing", (-0.3, 0.5))],
        [(0, missing, ORANGE, "0.6 of it", (0.83, 0.72))],
        [
            (1, added, plotting.QUIET, "adding: $+\\,v_1$", (0.62, 1.08)),
            (0, added, plotting.QUIET, "adding: $+\\,0.6\\,v_1$", (1.02, 0.5)),
        ],
    ):
        drawn = set(ax.get_children())
        for i, written, color, words, place in moves:
            draw_move(ax, i, before[i], written, color, words, place)
        stages.append([artist for artist in ax.get_children() if artist not in drawn])
    return fig, stages
