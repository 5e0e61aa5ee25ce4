"""What must cross the border of two slices: for a state, a convolution, positions, attention."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, GREEN = plotting.COLORS[0], plotting.COLORS[2]
PALE = "#cfe3f1"
WRITTEN = [[0.9, 0.2, 0.5], [0.1, 0.7, 0.3], [0.4, 0.6, 0.8]]  # only its size matters here
SIDE = 0.32


def draw_tokens(ax, x, y, colors, side=SIDE, high=0.5):
    for i, color in enumerate(colors):
        ax.add_patch(Rectangle((x + side * i, y), side, high, fc=color, ec="white"))


def draw_row(ax, y, name, needed):
    """Two slices of eight tokens; those of rank 0 that rank 1 needs are full, the others pale."""
    ax.text(0.1, y + 0.7, name, fontsize=18)
    draw_tokens(ax, 0.1, y, [BLUE if t in needed else PALE for t in range(8)])
    draw_tokens(ax, 5.3, y, [BLUE] * 8)
    plotting.arrow(ax, (2.8, y + 0.25), (5.2, y + 0.25), color=GREEN)


def draw():
    fig, ax = plotting.canvas(8.0, 7.2)
    rows = {"S: one pair": [], "convolution: the halo": [5, 6, 7], "positions: one number": []}
    rows["A: all keys and values"] = [*range(8)]
    heights = [5.35 - 1.7 * i for i in range(4)]
    for y, (name, needed) in zip(heights, rows.items(), strict=True):
        draw_row(ax, y, name, needed)
    for x, rank in ((1.35, 0), (6.6, 1)):
        ax.text(x, 6.8, f"rank {rank}", ha="center", fontsize=18, color=plotting.QUIET)
    ax.text(3.35, heights[0] + 0.62, "$a_0,$", ha="center", va="center", fontsize=19)
    plotting.state_grid(ax, 3.7, heights[0] + 0.32, WRITTEN, cell=0.22)
    draw_tokens(ax, 3.5, heights[1] + 0.35, [BLUE] * 3)
    ax.text(3.95, heights[2] + 0.6, "8", ha="center", va="center", fontsize=19)
    for row in (0.35, 0.68):
        draw_tokens(ax, 3.25, heights[3] + row, [BLUE] * 8, side=0.22, high=0.28)
    return fig, []
