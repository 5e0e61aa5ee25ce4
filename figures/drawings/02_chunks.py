"""All chunks solve their triangular systems at once; the state is handed on. For chapter 02."""

from matplotlib.patches import Polygon, Rectangle

from cheems_ref import plotting

BLUE, RED, GREEN = plotting.COLORS[:3]
CHUNKS, WIDTH, GAP, SIDE = 4, 2.0, 1.0, 1.5
SOLVES, STATES = 2.6, 0.55  # y of the two rows


def draw_solve(ax, i):
    """The triangular system of chunk i and what it gives."""
    x = i * (WIDTH + GAP) + 0.6
    triangle = [(x, SOLVES), (x, SOLVES + SIDE), (x + SIDE, SOLVES)]
    ax.add_patch(Polygon(triangle, facecolor=BLUE, alpha=0.35, edgecolor=BLUE))
    ax.add_patch(
        Rectangle((x, SOLVES), SIDE, SIDE, facecolor="none", edgecolor=plotting.QUIET, lw=1)
    )
    ax.text(x + 0.1, SOLVES + 0.2, "$I + T$", fontsize=17)
    ax.text(x + SIDE / 2, SOLVES + SIDE + 0.2, f"chunk {i}", ha="center", fontsize=18)
    plotting.arrow(ax, (x + SIDE / 2, SOLVES - 0.1), (x + SIDE / 2, STATES + 0.65), color=BLUE)
    ax.text(x + SIDE / 2 + 0.15, STATES + 1.15, "$U_V, U_K$", fontsize=17)


def draw_state(ax, i):
    """The state after chunk i, from the one before it."""
    x = i * (WIDTH + GAP) + 0.6 + SIDE / 2
    start = x - WIDTH - GAP + 0.4 if i else x - 1.3
    plotting.arrow(ax, (start, STATES), (x - 0.45, STATES), color=GREEN)
    plotting.box(ax, x, STATES, "state", color=GREEN)


def draw():
    fig, ax = plotting.canvas(12.6, 5.0)
    for i in range(CHUNKS):
        draw_solve(ax, i)
    ax.text(11.8, SOLVES + SIDE / 2, "all at\nonce", va="center", fontsize=18, color=BLUE)
    drawn = set(ax.get_children())
    for i in range(CHUNKS):
        draw_state(ax, i)
    ax.text(11.8, STATES, "one by\none", va="center", fontsize=18, color=GREEN)
    return fig, [[artist for artist in ax.get_children() if artist not in drawn]]
