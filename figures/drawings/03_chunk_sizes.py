"""One matrix of 72 tokens, cut into chunks of four sizes, for chapter 03."""

from matplotlib.patches import Polygon

from cheems_ref import plotting

BLUE, _, GREEN = plotting.COLORS[:3]
LENGTH, SIDE = 72, 2.5
SIZES = {  # tokens of a chunk: what is written above and below
    1: ("chunks of 1", "the recurrence"),
    8: ("chunks of 8", "9 chunks"),
    24: ("chunks of 24", "3 chunks"),
    72: ("one chunk of 72", "the quadratic form"),
}


def triangle(ax, x, y, side, color):
    """A lower triangle with its upper left corner at (x, y)."""
    corners = [(x, y), (x, y - side), (x + side, y - side)]
    ax.add_patch(Polygon(corners, fc=color, ec="none", alpha=0.55))


def draw_size(ax, x, y, size):
    """The state below the diagonal, and attention inside each chunk on it."""
    chunks, side = LENGTH // size, SIDE * size / LENGTH
    staircase = [(x, y - SIDE)]  # around all blocks below the diagonal
    for chunk in range(chunks):
        left, top = x + chunk * side, y - chunk * side
        triangle(ax, left, top, side, BLUE)
        staircase += [(left, top), (left, top - side)]
        if chunk and size > 1:
            ax.plot([x, left], [top, top], color="white", lw=1, zorder=3)
            ax.plot([left, left], [top - side, y - SIDE], color="white", lw=1, zorder=3)
    if chunks > 1:
        ax.add_patch(Polygon(staircase, fc=GREEN, ec="none", alpha=0.55))


def draw():
    fig, ax = plotting.canvas(13, 4.2)
    for place, (size, (above, below)) in enumerate(SIZES.items()):
        x, y = 0.3 + 3.2 * place, 3.5
        ax.text(x, y + 0.15, above, fontsize=18, weight="bold")
        draw_size(ax, x, y, size)
        style = dict(ha="center", va="top", fontsize=17, color=plotting.INK)
        ax.text(x + SIDE / 2, y - SIDE - 0.12, below, **style)
    words = dict(ha="center", va="bottom", fontsize=17)
    ax.text(3.6, 0.05, "blue: attention inside a chunk", color=BLUE, **words)
    ax.text(9.4, 0.05, "green: through the state", color=GREEN, **words)
    return fig, []
