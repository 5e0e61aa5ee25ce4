"""Step 3 right and as printed: what reaches chunk 2, and which sum of the matrix that is."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, WRONG, GREEN = plotting.COLORS[:3]
ENTRIES = [
    ["1", "0", "0", "0"],
    ["$a_0$", "1", "0", "0"],
    ["$a_0a_1$", "$a_1$", "1", "0"],
    ["$a_0a_1a_2$", "$a_1a_2$", "$a_2$", "1"],
]
SOURCES = ["0", "$W_0$", "$W_1$", "$W_2$"]
TARGETS = ["chunk 0", "chunk 1", "chunk 2", "the end"]
WIDE, HIGH, BAR = 1.7, 0.7, 4.3  # of a chunk, and where the chunks stand


def draw_chunks(ax, x, title):
    """Three chunks in a row; the state that chunk 2 starts from is a line in front of it."""
    ax.text(x, 6.0, title, fontsize=18, weight="bold")
    for chunk in range(3):
        box = dict(fc="white", ec=BLUE, lw=2)
        ax.add_patch(Rectangle((x + chunk * WIDE, BAR), WIDE - 0.12, HIGH, **box))
        at = x + (chunk + 0.5) * WIDE - 0.06
        ax.text(at, BAR + HIGH / 2, f"chunk {chunk}", ha="center", va="center", fontsize=15)
    start = x + 2 * WIDE - 0.06
    ax.plot([start, start], [BAR - 0.25, BAR + HIGH + 0.25], color=GREEN, lw=4)
    return start


def path(ax, start, end, text, color, bend, at):
    plotting.arrow(ax, start, end, color=color, bend=bend)
    ax.text(*at, text, ha="center", va="center", color=color, fontsize=16)


def draw_matrix(ax, x, y, lit, color, sum_of):
    """(3.9) with its sources and targets named, the entries of the sum lit, the sum beside it."""
    wide, high = 1.0, 0.56
    for row, entries in enumerate(ENTRIES):
        for column, entry in enumerate(entries):
            corner = x + column * wide, y - (row + 1) * high
            shade = dict(fc=color, alpha=0.3) if (row, column) in lit else dict(fc="white")
            ax.add_patch(Rectangle(corner, wide, high, ec=plotting.QUIET, lw=1, **shade))
            middle = corner[0] + wide / 2, corner[1] + high / 2
            ax.text(*middle, entry, ha="center", va="center", fontsize=15)
        middle = y - (row + 0.5) * high
        ax.text(x - 0.15, middle, TARGETS[row], ha="right", va="center", fontsize=15)
        ax.text(x + (row + 0.5) * wide, y + 0.12, SOURCES[row], ha="center", fontsize=15)
    ax.text(x + 2.5 * wide, y - 4 * high - 0.42, sum_of, ha="center", color=color, fontsize=17)


def draw():
    fig, ax = plotting.canvas(13, 6.4)
    top = BAR + HIGH + 0.05

    start = draw_chunks(ax, 0.3, "corrected: along the row")
    path(ax, (1.1, top), (start - 0.05, top), "$a_1 W_0$", GREEN, -0.35, (2.3, top + 0.62))
    path(ax, (2.8, BAR - 0.05), (start - 0.05, BAR - 0.1), "$W_1$", GREEN, 0.5, (3.0, BAR - 0.55))
    row = [(2, column) for column in range(4)]
    draw_matrix(ax, 1.4, 2.9, row, GREEN, "$a_1 W_0 + W_1$")

    drawn = set(ax.get_children())
    start = draw_chunks(ax, 7.0, "as printed: down the column")
    ax.text(8.5, top + 0.3, "$W_0$ is lost", ha="center", fontsize=16, color=WRONG)
    path(ax, (9.5, BAR - 0.05), (start - 0.05, BAR - 0.1), "$W_1$", GREEN, 0.5, (9.7, BAR - 0.55))
    path(ax, (12.0, top), (start + 0.05, top), "peeks: $a_2 W_1$", WRONG, 0.45, (11.4, top + 0.68))
    column = [(row, 2) for row in range(4)]
    draw_matrix(ax, 8.1, 2.9, column, WRONG, "$W_1 + a_2 W_1$")
    return fig, [[artist for artist in ax.get_children() if artist not in drawn]]
