"""A tile of B in the last chunk: where its mask is false, a load returns zeros."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, RED = plotting.COLORS[:2]
TOKENS, NUMBERS = range(32, 48), range(16, 32)  # of the last chunk; of the second tile
LENGTH, STATE = 42, 24  # how many there are
CELL, LEFT, TOP = 0.3, 3.6, 5.3


def draw_tile(ax):
    """A square for every place of the tile, with what a load returns there."""
    for i, token in enumerate(TOKENS):
        for j, number in enumerate(NUMBERS):
            exists = token < LENGTH and number < STATE
            place = LEFT + CELL * j, TOP - CELL * (i + 1)
            face = BLUE if exists else "white"
            ax.add_patch(Rectangle(place, CELL, CELL, fc=face, ec=plotting.QUIET, lw=0.8))
            if not exists:
                middle = place[0] + CELL / 2, place[1] + CELL / 2
                ax.text(*middle, "0", color=RED, fontsize=13, ha="center", va="center")


def draw_masks(ax):
    """The two masks, one over the columns and one beside the rows, and what both together say."""
    for j, words in ((0, "16"), (7, "23"), (15, "31")):
        ax.text(LEFT + CELL * (j + 0.5), TOP + 0.15, words, ha="center", fontsize=15)
    for i, words in ((0, "token 32"), (9, "token 41"), (15, "token 47")):
        y = TOP - CELL * (i + 0.5)
        ax.text(LEFT - 0.15, y, words, ha="right", va="center", fontsize=15)
    ax.text(LEFT + CELL * 8, TOP + 0.55, "numbers of $B$", ha="center", fontsize=16)
    wide, high = CELL * (STATE - 16), CELL * (LENGTH - 32)
    ax.plot([LEFT, LEFT + wide], [TOP + 0.06] * 2, color=BLUE, lw=4)
    ax.plot([LEFT - 0.06] * 2, [TOP, TOP - high], color=BLUE, lw=4)
    x = LEFT + CELL * 16 + 0.4
    ax.text(
        x, 4.3, "loaded where both masks are true:\n10 tokens × 8 numbers", color=BLUE, fontsize=17
    )
    ax.text(x, 1.6, "elsewhere a load returns zeros\nand reads nothing", color=RED, fontsize=17)


def draw():
    fig, ax = plotting.canvas(12.8, 6.2)
    draw_tile(ax)
    draw_masks(ax)
    return fig, []
