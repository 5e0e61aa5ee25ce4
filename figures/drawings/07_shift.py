"""A window of bytes, and the byte that each of them has to predict."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BYTES = "The class"
STEP, SIDE, FIRST = 1.25, 0.72, 2.5


def draw_row(ax, y, letters, color):
    """Bytes in boxes of one colour; a space is shown as an open box."""
    for place, letter in enumerate(letters):
        x, shown = FIRST + STEP * place, "␣" if letter == " " else letter
        corner = (x - SIDE / 2, y - SIDE / 2)
        ax.add_patch(Rectangle(corner, SIDE, SIDE, fc="white", ec=color, lw=2))
        ax.text(x, y, shown, ha="center", va="center", fontsize=23)


def draw_model(ax):
    """The model, as wide as the window."""
    left, wide = FIRST - SIDE, STEP * (len(BYTES) - 2) + 2 * SIDE
    ax.add_patch(Rectangle((left, 1.85), wide, 0.7, fc="white", ec=plotting.QUIET, lw=2))
    words = "the model: each byte sees itself and what came before"
    ax.text(left + wide / 2, 2.2, words, ha="center", va="center", fontsize=19)


def draw():
    fig, ax = plotting.canvas(12.4, 4.4)
    blue, red = plotting.COLORS[0], plotting.COLORS[1]
    ax.text(0.1, 3.6, "read", fontsize=20, va="center", color=blue)
    draw_row(ax, 3.6, BYTES[:-1], blue)
    draw_model(ax)
    before = set(ax.get_children())
    ax.text(0.1, 0.8, "predicted", fontsize=20, va="center", color=red)
    draw_row(ax, 0.8, BYTES[1:], red)
    for place in range(len(BYTES) - 1):
        x = FIRST + STEP * place
        plotting.arrow(ax, (x, 3.2), (x, 2.6))
        plotting.arrow(ax, (x, 1.8), (x, 1.2), color=red)
    return fig, [[artist for artist in ax.get_children() if artist not in before]]
