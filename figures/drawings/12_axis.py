"""Decays from source to target: summed over a row, or by mistake over a column."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

TOKENS, SIDE = 6, 0.56
DECAYS = [[0.5 ** (t - s) if s < t else 0.0 for s in range(TOKENS)] for t in range(TOKENS)]
BLUE, RED = plotting.COLORS[:2]


def draw_decays(ax, x, title, says, color, frame):
    """Targets downward, sources across; `frame` is what a sum takes: column, row, width, height."""
    ax.text(x + 1.7, 5.0, title, ha="center", fontsize=20)
    ax.text(x + 1.7, 4.45, "source $s$ →", ha="center", fontsize=18, color=plotting.QUIET)
    ax.text(x - 0.2, 2.55, "target $t$ →", ha="right", va="center", rotation=270, fontsize=18,
            color=plotting.QUIET)  # fmt: skip
    plotting.state_grid(ax, x, 0.9, DECAYS, cell=SIDE, color=BLUE)
    column, row, width, height = frame
    place = (x + SIDE * column, 0.9 + SIDE * (TOKENS - row - height))
    size = (SIDE * width, SIDE * height)
    ax.add_patch(Rectangle(place, *size, fill=False, ec=color, lw=5))
    ax.text(x + 1.7, 0.35, says, ha="center", va="center", fontsize=18, color=color)


def draw():
    fig, ax = plotting.canvas(10.4, 5.5)
    green = plotting.COLORS[2]
    draw_decays(ax, 0.9, "sum over the sources", "token 3 gets 0, 1 and 2", green, (0, 3, 6, 1))
    draw_decays(ax, 6.2, "sum over the targets", "token 3 needs 4 and 5", RED, (3, 0, 1, 6))
    return fig, []
