"""Nine losses lose the means of their rows, then those of their seeds; noise is left."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, RED, GREEN = plotting.COLORS[:3]
LOSSES = ((214, 208, 208), (207, 204, 201), (209, 206, 206))  # hundredths of a nat
CELL, LOW = 0.78, 1.15
PLACES = 0.9, 5.7, 9.95  # of the three tables


def means(table):
    """The mean of each row, a whole number here."""
    return [sum(row) // len(row) for row in table]


def draw_table(ax, left, table, color=None):
    """Three by three numbers, a row of the chapter's tables downward, a seed to the right."""
    for i, row in enumerate(table):
        for j, number in enumerate(row):
            x, y = left + CELL * j, LOW + CELL * (2 - i)
            shade = dict(fc=color or "white", alpha=0.08 + 0.3 * abs(number)) if color else {}
            ax.add_patch(Rectangle((x, y), CELL, CELL, **dict(fc="white") | shade, lw=0))
            ax.add_patch(Rectangle((x, y), CELL, CELL, fill=False, ec=plotting.QUIET, lw=1.2))
            words = f"{number}".replace("-", "−")
            ax.text(x + CELL / 2, y + CELL / 2, words, ha="center", va="center", fontsize=19)
    for j in range(3):
        x = left + CELL * (j + 0.5)
        ax.text(x, LOW + 3 * CELL + 0.12, j + 1, ha="center", fontsize=16)


def draw_losses(ax):
    """The losses, and their rows' means."""
    draw_table(ax, PLACES[0], LOSSES)
    for i, mean in enumerate(means(LOSSES)):
        y = LOW + CELL * (2.5 - i)
        ax.text(PLACES[0] - 0.12, y, f"row {'abc'[i]}", ha="right", va="center", fontsize=16)
        x = PLACES[0] + 3 * CELL + 0.14
        ax.text(x, y, mean, va="center", fontsize=19, color=BLUE)
    ax.text(PLACES[0] - 0.12, LOW + 3 * CELL + 0.12, "seed", ha="right", fontsize=16)
    ax.text(PLACES[0], 4.15, "losses, and rows' means", fontsize=18)


def draw_arrow(ax, end, words, color):
    """What is subtracted on the way to the table that begins at `end`."""
    y = LOW + 1.5 * CELL
    ax.text(end - 0.96, y + 0.2, words, ha="center", fontsize=16, color=color)
    plotting.arrow(ax, (end - 1.5, y), (end - 0.42, y), color=color)


def draw_without_rows(ax):
    """Each number less its row's mean, and the seeds' means of that."""
    table = without_rows()
    draw_arrow(ax, PLACES[1], "minus\nrows", BLUE)
    draw_table(ax, PLACES[1], table)
    for j, mean in enumerate(means(zip(*table, strict=True))):
        words = f"{mean}".replace("-", "−")
        x = PLACES[1] + CELL * (j + 0.5)
        ax.text(x, LOW - 0.15, words, ha="center", va="top", fontsize=19, color=RED)
    ax.text(PLACES[1], 4.15, "the rest, and seeds' means", fontsize=18)


def draw_noise(ax):
    """What is left."""
    table = without_rows()
    by_seed = means(zip(*table, strict=True))
    left = [[x - mean for x, mean in zip(row, by_seed, strict=True)] for row in table]
    draw_arrow(ax, PLACES[2], "minus\nseeds", RED)
    draw_table(ax, PLACES[2], left, GREEN)
    ax.text(PLACES[2], 4.15, "$e$, the noise", fontsize=18, color=GREEN)
    words = "rows and columns\nsum to zero: 4 are free"
    ax.text(PLACES[2], LOW - 0.15, words, va="top", fontsize=16)


def without_rows():
    """The losses less their rows' means."""
    pairs = zip(LOSSES, means(LOSSES), strict=True)
    return [[loss - mean for loss in row] for row, mean in pairs]


def draw():
    fig, ax = plotting.canvas(13.0, 4.6)
    draw_losses(ax)
    return fig, plotting.in_stages(ax, draw_without_rows, draw_noise)
