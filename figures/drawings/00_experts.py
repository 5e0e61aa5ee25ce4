"""E: an MLP that all tokens share, then a few experts that a token's query finds. Chapter 00."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting
from cheems_ref.plotting import arrow, box

BLUE, RED, GREEN = plotting.COLORS[:3]
HIGH, PLUS = 3.35, 11.75  # the height of the way, and where what was found is added up
LEFT, STEP, ACROSS = 7.4, 0.45, 8  # the first expert, from one to the next, and how many in a row
FOUND = {2, 5, 11, 20}  # of three rows of experts


def words(ax, x, y, text, color=plotting.INK, size=21):
    ax.text(x, y, text, ha="center", va="center", fontsize=size, color=color)


def draw_shared(ax):
    """From the token through the shared MLP to z."""
    words(ax, 0.55, HIGH, "token\n$x$", size=22)
    arrow(ax, (1.1, HIGH), (1.65, HIGH))
    ax.add_patch(Rectangle((1.75, 2.2), 2.7, 2.3, fc=GREEN, alpha=0.15, lw=0))
    ax.add_patch(Rectangle((1.75, 2.2), 2.7, 2.3, fc="none", ec=GREEN, lw=3))
    words(ax, 3.1, HIGH, "shared MLP:\nworks on\nevery token", size=22)
    arrow(ax, (4.5, HIGH), (5.1, HIGH), color=GREEN)
    words(ax, 5.35, HIGH, "$z$", GREEN, 24)
    words(ax, 3.1, 0.75, "what every token needs:\nstored once,\ncomputed for all", GREEN)


def place(expert):
    row, column = divmod(expert, ACROSS)
    return LEFT + STEP * column, HIGH + STEP * (1 - row)


def draw_search(ax):
    """The query finds the experts whose keys fit it best."""
    arrow(ax, (5.45, HIGH + 0.25), (6.0, 4.55), color=RED)
    box(ax, 6.35, 4.85, "query", color=RED, fontsize=20)
    arrow(ax, (6.95, 4.85), (7.6, 4.85), color=RED)
    box(ax, 9.35, 4.85, "the keys that fit: top $k$", color=RED, fontsize=20)
    for expert in range(3 * ACROSS):
        ax.scatter(*place(expert), s=330, color="#dddddd", linewidths=0)
    for expert in FOUND:
        ax.scatter(*place(expert), s=330, color=BLUE, linewidths=0)
    arrow(ax, (9.0, 4.45), (9.0, 4.1), color=RED)
    words(ax, 9.1, 0.75, "what this token needs:\n$k$ of many experts,\na neuron each", BLUE)


def draw_sum(ax):
    """The experts read z; their answers and z add up."""
    arrow(ax, (5.6, HIGH), (LEFT - 0.35, HIGH), color=GREEN)
    arrow(ax, (LEFT + STEP * ACROSS - 0.15, HIGH), (PLUS - 0.35, HIGH), color=BLUE)
    circle = dict(boxstyle="circle,pad=0.15", fc="white", ec=plotting.INK, lw=2)
    ax.text(PLUS, HIGH, "+", ha="center", va="center", fontsize=24, bbox=circle)
    ax.plot([5.35, 5.35, PLUS], [HIGH - 0.35, 1.75, 1.75], color=GREEN, lw=2)
    arrow(ax, (PLUS, 1.73), (PLUS, HIGH - 0.35), color=GREEN)
    arrow(ax, (PLUS + 0.35, HIGH), (12.5, HIGH))
    words(ax, 12.75, HIGH, "$y$", size=24)


def draw():
    fig, ax = plotting.canvas(13.0, 5.4)
    draw_shared(ax)
    stages = plotting.in_stages(ax, draw_search, draw_sum)
    ax.set(xlim=(0, 13.0), ylim=(0, 5.4))
    return fig, stages
