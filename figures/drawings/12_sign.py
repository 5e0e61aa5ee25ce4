"""Turn c by a quarter, or turn b instead: two right-angled vectors that give opposite products."""

from matplotlib.patches import Arc, Circle

from cheems_ref import plotting

QUERY, KEY = plotting.COLORS[1], plotting.COLORS[4]
LONG = 1.7


def draw_vector(ax, x, y, direction, color, name, faded=False):
    """A unit vector from (x, y), its name beside its tip; `direction` is right, up or left."""
    dx, dy = {"right": (LONG, 0), "up": (0, LONG), "left": (-LONG, 0)}[direction]
    look = dict(arrowstyle="-|>", lw=2 if faded else 5, mutation_scale=22, color=color)
    look |= dict(alpha=0.4) if faded else {}
    ax.annotate("", (x + dx, y + dy), (x, y), arrowprops=look | dict(shrinkA=0, shrinkB=0))
    aside = dict(right=(0.05, 0.2), up=(0.2, -0.1), left=(-0.1, 0.2))[direction]
    ax.text(x + dx + aside[0], y + dy + aside[1], name, fontsize=22, color=color,
            ha="left" if direction == "up" else "center")  # fmt: skip


def draw_turn(ax, x, y, start, color):
    ax.add_patch(Arc((x, y), 1.2, 1.2, theta1=start, theta2=start + 90, color=color, lw=2))


def draw():
    fig, ax = plotting.canvas(11.2, 4.6)
    ax.text(2.6, 4.2, r"by definition: $\langle R_t\,c,\;b\rangle$", ha="center", fontsize=20)
    draw_vector(ax, 2.6, 1.5, "right", QUERY, "$c$", faded=True)
    draw_turn(ax, 2.6, 1.5, 0, QUERY)
    draw_vector(ax, 2.5, 1.5, "up", KEY, "")
    draw_vector(ax, 2.7, 1.5, "up", QUERY, "$R_t\\,c$")
    ax.text(2.3, 2.7, "$b$", ha="right", fontsize=22, color=KEY)
    ax.text(2.6, 0.5, "same way: +1", ha="center", fontsize=20)
    before = [*ax.texts, *ax.patches]
    ax.text(8.4, 4.2, r"as printed: $\langle c,\;R_t\,b\rangle$", ha="center", fontsize=20)
    draw_vector(ax, 8.4, 1.5, "up", KEY, "$b$", faded=True)
    draw_turn(ax, 8.4, 1.5, 90, KEY)
    draw_vector(ax, 8.4, 1.5, "right", QUERY, "$c$")
    draw_vector(ax, 8.4, 1.5, "left", KEY, "$R_t\\,b$")
    ax.text(8.4, 0.5, "opposite ways: −1", ha="center", fontsize=20)
    for x in (2.6, 8.4):
        ax.add_patch(Circle((x, 1.5), 0.09, color=plotting.INK, zorder=3))
    return fig, [before, [a for a in (*ax.texts, *ax.patches) if a not in before]]
