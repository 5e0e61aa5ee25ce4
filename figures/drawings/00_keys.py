"""Two sorted lists of half scores, and a staircase that holds the best eight sums. Chapter 00."""

import torch

from cheems_ref import plotting
from cheems_ref.plotting import arrow, box

BLUE, RED = plotting.COLORS[:2]
LEFT, TOP, SIDE = 7.6, 3.75, 0.46  # the square's upper left corner, and the side of a cell
R, K = 8, 8  # rows and columns that are drawn, and experts to find


def draw_halves(ax, first, second):
    """The two halves of the query, and a sorted list of half scores along two edges."""
    for name, y, end in (("$q_1$", 2.1, 6.15), ("$q_2$", 4.6, 7.5)):
        box(ax, 5.2, y, name, color=RED, fontsize=22)
        arrow(ax, (5.6, y), (end, y), color=RED)
    lowest = min(first.min(), second.min()) - 0.3
    rows, columns = (0.75 * (scores - lowest) for scores in (first, second))  # lengths of bars
    for i in range(R):
        x, y = LEFT + SIDE * (i + 0.5), TOP - SIDE * (i + 0.5)
        ax.barh(y, -rows[i].item(), SIDE * 0.7, LEFT - 0.1, color=RED)
        ax.bar(x, columns[i].item(), SIDE * 0.7, TOP + 0.1, color=RED)
        for j in range(R):
            draw_cell(ax, i, j, "#eeeeee")
    for y, color, words in (
        (4.45, BLUE, "an expert:\none neuron, one cell"),
        (2.95, RED, "a half score: half the\nquery times half a key"),
        (1.45, plotting.INK, "a score: its row's half\nplus its column's half"),
    ):
        ax.text(0.1, y, words, va="center", fontsize=22, color=color)


def draw_cell(ax, i, j, color):
    x, y = LEFT + SIDE * (j + 0.5), TOP - SIDE * (i + 0.5)
    ax.scatter(x, y, s=520, marker="s", color=color, linewidths=0)


def draw_number(ax, i, j, color):
    x, y = LEFT + SIDE * (j + 0.5), TOP - SIDE * (i + 0.5)
    words = dict(ha="center", va="center", fontsize=19, color=color, zorder=5)
    ax.text(x, y, f"{(i + 1) * (j + 1)}", **words)


def draw_stairs(ax):
    """The cells that can be among the best, with how many, or more, are at least as good."""
    for i in range(R):
        for j in range(K // (i + 1)):
            draw_cell(ax, i, j, "#9ecae9")
            draw_number(ax, i, j, plotting.INK)
    words = "a number: at\nleast so many\nare as good,\nit included\n(grey: more\nthan 8)"
    ax.text(11.5, 2.5, words, va="center", fontsize=20)


def draw_best(ax, first, second):
    """The eight cells with the largest sums."""
    sums = first[:, None] + second
    for place in sums.flatten().topk(K).indices.tolist():
        draw_cell(ax, *divmod(place, R), BLUE)
        draw_number(ax, *divmod(place, R), "white")
    ax.text(11.5, 0.55, "dark: the\nbest eight", va="center", fontsize=20, color=BLUE)


def draw():
    fig, ax = plotting.canvas(13.4, 5.2)
    drawn = dict(generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    scores = 0.45 * torch.randn(2, R, **drawn).sort(descending=True).values
    draw_halves(ax, *scores)
    stages = plotting.in_stages(ax, draw_stairs, lambda ax: draw_best(ax, *scores))
    ax.set(xlim=(0, 13.4), ylim=(0, 5.2))
    return fig, stages
