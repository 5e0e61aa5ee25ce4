"""Two arrows that turn with their positions; the angle between them stays. For chapter 00."""

from math import cos, degrees, pi, sin

from matplotlib.patches import Arc, Circle

from cheems_ref import plotting

BLUE, RED = plotting.COLORS[:2]
STEP, SIZE = pi / 7, 1.45  # how far one position turns an arrow, and how long it is
QUERY, KEY = 0.15, 0.55  # the angles before they turn


def draw_pair(ax, x, y, query_at, key_at):
    """The query and the key around (x, y), each turned as far as its position says."""
    ax.add_patch(Circle((x, y), SIZE, facecolor="none", edgecolor=plotting.QUIET, lw=1))
    angles = {"q": QUERY + query_at * STEP, "k": KEY + key_at * STEP}
    for (name, angle), color in zip(angles.items(), (RED, BLUE), strict=True):
        end = x + SIZE * cos(angle), y + SIZE * sin(angle)
        plotting.arrow(ax, (x, y), end, color=color)
        place = x + (SIZE + 0.25) * cos(angle), y + (SIZE + 0.25) * sin(angle)
        at = query_at if name == "q" else key_at
        ax.text(*place, f"${name}_{{{at}}}$", color=color, ha="center", va="center", fontsize=19)
    between = Arc((x, y), 1.1, 1.1, theta1=degrees(angles["k"]), theta2=degrees(angles["q"]), lw=3)
    ax.add_patch(between)
    words = f"query at {query_at}, key at {key_at}"
    ax.text(x, y - SIZE - 0.6, words, ha="center", fontsize=17)


def draw():
    fig, ax = plotting.canvas(10.5, 4.6)
    for x, query_at, key_at in ((2.1, 4, 1), (8.3, 13, 10)):
        draw_pair(ax, x, 2.6, query_at, key_at)
    plotting.arrow(ax, (4.3, 2.6), (6.1, 2.6))
    ax.text(5.2, 2.85, "both 9 later", ha="center", fontsize=17)
    ax.text(5.2, 2.05, "same angle,\nsame score", ha="center", fontsize=17)
    ax.text(5.2, 1.1, "in S: $C$ for $q$,\n$B$ for $k$", ha="center", fontsize=17)
    ax.set_aspect("equal")
    return fig, []
