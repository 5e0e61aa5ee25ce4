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

    def draw_adding(ax):
        """Where linear attention brings both answers."""
        gray = VALUES[1], plotting.QUIET
        draw_move(ax, 1, before[1], *gray, "adding: $+\\,v_1$", (0.62, 1.08))
        draw_move(ax, 0, before[0], *gray, "adding: $+\\,0.6\\,v_1$", (1.02, 0.5))

    new = missing, ORANGE, "delta rule:\n+ what is missing", (-0.3, 0.45)
    old = missing, ORANGE, "delta rule:\n+ 0.6 of it", (0.65, 0.8)
    return fig, plotting.in_stages(
        ax,
        lambda ax: draw_move(ax, 1, before[1], *new),
        lambda ax: draw_move(ax, 0, before[0], *old),
        draw_adding,
    )
