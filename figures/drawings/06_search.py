"""A search by two half queries: the opening drawing of chapter 06."""

import torch

from cheems_ref import plotting

BLUE, RED, GREEN = plotting.COLORS[0], plotting.COLORS[1], plotting.COLORS[2]
LEFT, TOP, SIDE = 6.6, 3.6, 0.33  # the grid's upper left corner, and the side of a cell
MIDDLE, NEURONS, K = 2.75, 11.1, 6  # the height of the way, where the neurons are, how many


def draw_lists(ax, first, second):
    """Two lists of scores in descending order, along two edges of the grid."""
    lowest = torch.cat([first, second]).min() - 0.3
    for i in range(len(first)):
        y, x = TOP - SIDE * (i + 0.5), LEFT + SIDE * (i + 0.5)
        length, height = (0.38 * (scores[i] - lowest).item() for scores in (first, second))
        ax.barh(y, -length, SIDE * 0.7, LEFT - 0.1, color=RED)
        ax.bar(x, height, SIDE * 0.7, TOP + 0.1, color=RED)
    ax.text(8.6, 4.7, "two lists of r\nscores, sorted", fontsize=15, va="center")


def draw_way(ax):
    """From a token to two half queries."""
    plotting.box(ax, 1.75, MIDDLE, "shared\npart", color=GREEN)
    plotting.box(ax, 3.85, MIDDLE, "map")
    for start, end in ((0.6, 1.1), (2.4, 2.7), (3.05, 3.4)):
        plotting.arrow(ax, (start, MIDDLE), (end, MIDDLE))
    for name, half, end in (("$q_1$", 2.2, 5.75), ("$q_2$", 4.1, 6.5)):
        plotting.arrow(ax, (4.3, MIDDLE), (4.65, half), color=RED)
        plotting.box(ax, 5.0, half, name, color=RED, fontsize=17)
        plotting.arrow(ax, (5.35, half), (end, half), color=RED)
    for x, y, words in (
        (0.1, MIDDLE, "token\nx"),
        (2.75, MIDDLE, "z"),
        (4.3, 4.72, "half queries"),
    ):
        ax.text(x, y, words, fontsize=15, va="center")


def draw_staircase(ax, first, second):
    """The sums of two scores: those that may be among the K best, and those that are."""
    kept, pale = (first[:, None] + second).flatten(), "#9ecae9"
    best = kept.topk(K).indices.tolist()
    for i in range(len(first)):
        for j in range(len(second)):
            color = pale if (i + 1) * (j + 1) <= K else "#eeeeee"
            color = BLUE if i * len(second) + j in best else color
            place = LEFT + SIDE * (j + 0.5), TOP - SIDE * (i + 0.5)
            ax.scatter(*place, s=270, marker="s", color=color, linewidths=0)
    words = "dark: the k best sums; pale: candidates"
    ax.text(6.1, 0.62, words, fontsize=15, va="center")


def draw_neurons(ax):
    """The neurons that were found, what they read, and the sum of what they write."""
    for i in range(K):
        place = MIDDLE + 0.42 * (i - (K - 1) / 2)
        ax.scatter(NEURONS, place, s=230, color=BLUE)
        end = NEURONS + 1.05, MIDDLE + 0.1 * (place - MIDDLE)
        plotting.arrow(ax, (NEURONS + 0.15, place), end)
    plus = NEURONS + 1.3
    circle = dict(boxstyle="circle,pad=0.15", fc="white", ec=plotting.INK, lw=1.5)
    ax.text(plus, MIDDLE, "+", ha="center", va="center", fontsize=18, bbox=circle)
    for start, end in ((9.4, NEURONS - 0.4), (NEURONS + 1.6, NEURONS + 2.1)):
        plotting.arrow(ax, (start, MIDDLE), (end, MIDDLE))
    ax.plot([2.9, 2.9, plus], [MIDDLE - 0.25, 0.2, 0.2], color=GREEN, lw=2)
    plotting.arrow(ax, (NEURONS, 0.17), (NEURONS, MIDDLE - 1.35), color=GREEN)
    plotting.arrow(ax, (plus, 0.17), (plus, MIDDLE - 0.35), color=GREEN)
    for x, y, words in (
        (10.5, 4.2, "k neurons"),
        (13.3, MIDDLE, "y"),
        (3.05, 0.68, "z: read by the neurons,\nthen added"),
    ):
        ax.text(x, y, words, fontsize=15, va="center")


def draw():
    fig, ax = plotting.canvas(13.6, 5.1)
    drawn = dict(generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    scores = torch.randn(2, 8, **drawn).sort(descending=True).values
    draw_way(ax)
    draw_lists(ax, *scores)
    stages = plotting.in_stages(ax, lambda ax: draw_staircase(ax, *scores), draw_neurons)
    ax.set(xlim=(0, 13.6), ylim=(0, 5.1))
    return fig, stages
