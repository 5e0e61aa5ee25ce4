"""Four experts that each store the map they have in common, and a shared expert that could."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, GREEN = plotting.COLORS[0], plotting.COLORS[2]
SIDE, STEP, LOW = 0.95, 1.5, 1.35  # an expert's half, from one to the next, the lower edge


def draw_half(ax, x, y, words, color):
    """A map that an expert stores."""
    ax.add_patch(Rectangle((x - SIDE / 2, y), SIDE, SIDE, fc=color, alpha=0.25, ec=color, lw=2))
    ax.text(x, y + SIDE / 2, words, fontsize=22, ha="center", va="center")


def draw():
    fig, ax = plotting.canvas(8.4, 4.6)
    for i in range(4):
        draw_half(ax, 0.9 + STEP * i, LOW, "$M$", GREEN)
        draw_half(ax, 0.9 + STEP * i, LOW + SIDE, f"$M_{i + 1}$", BLUE)
    ax.text(0.9 + 1.5 * STEP, 3.6, "four routed experts", fontsize=21, ha="center", color=BLUE)
    ax.text(0.9 + 1.5 * STEP, 0.75, "the common map, four times", fontsize=21, ha="center",
            va="center", color=GREEN)  # fmt: skip
    drawn = set(ax.get_children())
    draw_half(ax, 7.4, LOW, "$M$?", GREEN)
    ax.text(7.4, LOW + SIDE + 0.2, "shared\nexpert", fontsize=21, ha="center", color=GREEN)
    ax.text(7.4, 0.75, "or once?", fontsize=21, ha="center", va="center", color=GREEN)
    return fig, [[artist for artist in ax.get_children() if artist not in drawn]]
