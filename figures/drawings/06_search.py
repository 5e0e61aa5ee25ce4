"""A search by two half queries: the opening drawing of chapter 06."""

import torch

from cheems_ref import plotting


def draw_staircase(ax, left, top, first, second, k, side=0.33):
    """Two lists of scores in descending order, and the pairs that may be among the k best."""
    lowest, kept = torch.cat([first, second]).min() - 0.3, (first[:, None] + second).flatten()
    best, pale = kept.topk(k).indices.tolist(), "#9ecae9"
    for i in range(len(first)):
        y, x = top - side * (i + 0.5), left + side * (i + 0.5)
        length, height = (0.38 * (scores[i] - lowest).item() for scores in (first, second))
        ax.barh(y, -length, side * 0.7, left - 0.1, color=plotting.COLORS[4])
        ax.bar(x, height, side * 0.7, top + 0.1, color=plotting.COLORS[4])
        for j in range(len(second)):
            color = pale if (i + 1) * (j + 1) <= k else "#eeeeee"
            color = plotting.COLORS[0] if i * len(second) + j in best else color
            ax.scatter(left + side * (j + 0.5), y, s=270, marker="s", color=color, linewidths=0)


def draw_way(ax, x, y, orange=plotting.COLORS[1]):
    """From a token to two half queries, and from the neurons at x to the sum."""
    plotting.box(ax, 1.75, y, "shared\npart", color=orange)
    plotting.box(ax, 3.85, y, "map")
    for start, end in ((0.6, 1.1), (2.4, 2.7), (3.05, 3.4), (9.4, x - 0.4), (x + 1.6, x + 2.1)):
        plotting.arrow(ax, (start, y), (end, y))
    for name, half, end in (("$q_1$", 2.2, 5.75), ("$q_2$", 4.1, 6.5)):
        plotting.arrow(ax, (4.3, y), (4.65, half))
        plotting.box(ax, 5.0, half, name, fontsize=17)
        plotting.arrow(ax, (5.35, half), (end, half))
    ax.plot([2.9, 2.9, x + 1.3], [y - 0.25, 0.2, 0.2], color=orange, lw=2)
    plotting.arrow(ax, (x, 0.17), (x, y - 1.35), color=orange)
    plotting.arrow(ax, (x + 1.3, 0.17), (x + 1.3, y - 0.35), color=orange)


def draw_neurons(ax, x, y, k):
    """The neurons that were found, and the sum of what they write."""
    for i in range(k):
        place = y + 0.42 * (i - (k - 1) / 2)
        ax.scatter(x, place, s=230, color=plotting.COLORS[0])
        plotting.arrow(ax, (x + 0.15, place), (x + 1.05, y + 0.1 * (place - y)))
    circle = dict(boxstyle="circle,pad=0.15", fc="white", ec=plotting.INK, lw=1.5)
    ax.text(x + 1.3, y, "+", ha="center", va="center", fontsize=18, bbox=circle)


def draw_words(ax):
    """The words of the opening drawing."""
    for x, y, words in (
        (0.1, 2.75, "token\nx"),
        (2.75, 2.75, "z"),
        (4.3, 4.72, "half queries"),
        (8.6, 4.7, "two lists of r\nscores, sorted"),
        (10.5, 4.2, "k neurons"),
        (13.3, 2.75, "y"),
        (3.05, 0.68, "z: read by the neurons,\nthen added"),
        (6.1, 0.62, "dark: the k best sums; pale: candidates"),
    ):
        ax.text(x, y, words, fontsize=15, va="center")


def draw():
    fig, ax = plotting.canvas(13.6, 5.1)
    draw_way(ax, 11.1, 2.75)
    drawn = dict(generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    scores = torch.randn(2, 8, **drawn).sort(descending=True).values
    draw_staircase(ax, 6.6, 3.6, *scores, 6)
    draw_neurons(ax, 11.1, 2.75, 6)
    draw_words(ax)
    ax.set(xlim=(0, 13.6), ylim=(0, 5.1))
    return fig, []
