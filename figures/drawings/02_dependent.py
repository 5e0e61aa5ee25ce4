"""Three keys in a plane close a triangle, and their values need not. For chapter 02."""

from itertools import pairwise

from cheems_ref import plotting
from cheems_ref.plotting import arrow

BLUE, RED = plotting.COLORS[:2]
KEYS, VALUES = [(1.0, 0.0), (0.6, 0.8), (-0.28, 0.96)], [(0.9, 0.2), (-0.6, 0.9), (-0.9, -0.3)]


def combination():
    """Numbers a with a_0 k_0 + a_1 k_1 + a_2 k_2 = 0 and a_2 = 1, by Cramer's rule."""
    (a, c), (b, d), (x, y) = KEYS
    whole = a * d - b * c
    return [-(x * d - b * y) / whole, -(a * y - x * c) / whole, 1.0]


def corners(vectors, numbers):
    """The corners of a path of a_0 times the first vector, then a_1 times the second, and so on."""
    path = [(0.0, 0.0)]
    for (x, y), a in zip(vectors, numbers, strict=True):
        path.append((path[-1][0] + a * x, path[-1][1] + a * y))
    return path


def draw_path(ax, path, letter, place):
    """The vectors of a path, tip to tail, each with its name."""
    for i, (start, end) in enumerate(pairwise(path)):
        arrow(ax, start, end, color=BLUE)
        middle = [(a + b) / 2 for a, b in zip(start, end, strict=True)]
        at = [m + shift for m, shift in zip(middle, place[i], strict=True)]
        ax.text(*at, f"$a_{i} {letter}_{i}$", color=BLUE, ha="center", va="center", fontsize=21)


def draw():
    fig, axes = plotting.figure(1, 2, size=(11.5, 5))
    numbers = combination()
    closed, open_path = corners(KEYS, numbers), corners(VALUES, numbers)
    assert max(map(abs, closed[-1])) < 1e-12 < 0.5 < max(map(abs, open_path[-1]))
    draw_path(axes[0], closed, "k", [(0, 0.12), (0.26, 0), (-0.26, 0)])
    draw_path(axes[1], open_path, "v", [(-0.1, 0.22), (0.32, 0), (0.15, -0.25)])
    drawn = set(axes[1].get_children())
    arrow(axes[1], (0, 0), open_path[-1], color=RED)
    axes[1].text(0.0, -1.1, "the sum\nisn't 0", color=RED, ha="center", fontsize=20)
    axes[0].set(xlim=(-0.5, 1.5), ylim=(-1.2, 0.4))
    axes[1].set(xlim=(-0.5, 2.1), ylim=(-1.6, 0.6))
    titles = "three keys in the plane: the sum is 0", "their values: any sum"
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, fontsize=19)
        ax.set_aspect("equal")
        ax.set_axis_off()
    return fig, [[artist for artist in axes[1].get_children() if artist not in drawn]]
