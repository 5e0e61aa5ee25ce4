"""The blocks of M, each named by the programs that make it, and what the three kernels are."""

from itertools import pairwise

from matplotlib.patches import Polygon, Rectangle

from cheems_ref import plotting

BLUE, _, GREEN, _, ORANGE, _ = plotting.COLORS
ENDS = (0, 16, 32, 42)  # where the three chunks begin, and the last one's end
UNIT, LEFT, TOP = 0.125, 0.2, 5.7  # inches of a token; the corner of M
KERNELS = (
    ("_write", ORANGE, "step 2: a program per chunk and 32 channels", "what a chunk writes"),
    ("_carry", GREEN, "step 3: a program per 512 numbers of a state", "a state before each chunk"),
    ("_read", BLUE, "steps 1 and 4: one per chunk and 32 channels", "the dark block, and $y$"),
)  # fmt: skip


def place(row, column):
    """Where an entry of M has its upper left corner."""
    return LEFT + UNIT * column, TOP - UNIT * row


def draw_dark(ax):
    """The blocks on the diagonal: pairs inside a chunk, made by one program of `_read`."""
    for i, (start, end) in enumerate(pairwise(ENDS)):
        corners = [place(start, start), place(end, start), place(end, end)]
        ax.add_patch(Polygon(corners, fc=BLUE, ec=plotting.QUIET, lw=1.2))
        x, y = place(end, start)
        ax.text(x + 0.1, y + 0.15, f"read {i}", color="white", fontsize=17)


def draw_light(ax):
    """The blocks below: what a chunk writes, the state carries, and a later chunk reads."""
    for i in range(3):
        for j in range(i):
            (left, high), (right, low) = place(ENDS[i], ENDS[j]), place(ENDS[i + 1], ENDS[j + 1])
            size = right - left, high - low
            ax.add_patch(Rectangle((left, low), *size, fc="#f4f4f4", ec=plotting.QUIET, lw=1.2))
            words = (f"write {j}", ORANGE), ("carry", GREEN), (f"read {i}", BLUE)
            step = size[1] / 3.4
            for k, (word, color) in enumerate(words):
                at = (left + right) / 2, (low + high) / 2 + (1 - k) * step
                ax.text(*at, word, color=color, fontsize=17, ha="center", va="center")


def draw_kernel(ax, k):
    """A kernel's name, its programs, and what they make."""
    name, color, programs, makes = KERNELS[k]
    y = 4.75 - 1.7 * k
    ax.text(6.2, y + 0.5, name, color=color, fontsize=21, weight="bold")
    ax.text(6.2, y, programs, fontsize=19)
    ax.text(6.2, y - 0.42, makes, fontsize=19, color=color)


def draw():
    fig, ax = plotting.canvas(12.4, 5.9)
    draw_dark(ax)
    draw_kernel(ax, 2)
    drawn = set(ax.get_children())
    draw_light(ax)
    for k in (0, 1):
        draw_kernel(ax, k)
    return fig, [[artist for artist in ax.get_children() if artist not in drawn]]
