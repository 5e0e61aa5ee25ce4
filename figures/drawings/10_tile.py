"""A tile of B in the last chunk: a grid of addresses; where its mask is false, a load is zero."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, RED = plotting.COLORS[:2]
INK = plotting.INK
TOKENS, NUMBERS = range(32, 48), range(16, 32)  # of the last chunk; of the second tile
LENGTH, STATE, GROUPS, GROUP = 42, 24, 2, 1  # how many there are; the group of head 2
WIDE, HIGH, LEFT, TOP = 0.34, 0.26, 4.9, 4.55


def middle(i, j):
    """Of a square: its row and its column."""
    return LEFT + WIDE * (j + 0.5), TOP - HIGH * (i + 0.5)


def draw_places(ax):
    """A square for every place of the tile, and the addresses of three."""
    for i in range(16):
        for j in range(16):
            corner = LEFT + WIDE * j, TOP - HIGH * (i + 1)
            ax.add_patch(Rectangle(corner, WIDE, HIGH, fc="white", ec=plotting.QUIET, lw=0.8))
    for j, words in ((0, "16"), (7, "23"), (15, "31")):
        ax.text(middle(0, j)[0], TOP + 0.12, words, ha="center", fontsize=17)
    for i, words in ((9, "token 41"), (15, "token 47")):
        ax.text(LEFT - 0.15, middle(i, 0)[1], words, ha="right", va="center", fontsize=17)
    ax.text(LEFT + WIDE * 8, TOP + 0.5, "columns: numbers of $B$", ha="center", fontsize=17)
    ax.text(LEFT - 0.15, middle(12, 0)[1], "rows: tokens", ha="right", va="center", fontsize=17)


def draw_addresses(ax):
    """What the first places of two rows have for an address, in the group of head 2."""
    for i in (0, 1):
        row = TOKENS[i] * GROUPS + GROUP
        corner, y = (LEFT, TOP - HIGH * (i + 1)), TOP - 0.1 - 0.36 * i
        ax.add_patch(Rectangle(corner, WIDE, HIGH, fc="none", ec=INK, lw=2.5, zorder=3))
        words = f"token {TOKENS[i]}: {row} · {STATE} + {NUMBERS[0]} = {row * STATE + NUMBERS[0]}"
        ax.text(LEFT - 0.5, y, words, fontsize=17, color=INK, ha="right", va="center")
        ax.plot([LEFT - 0.42, LEFT], [y, middle(i, 0)[1]], color=INK, lw=1.8)
    row = TOKENS[0] * GROUPS + GROUP
    words = f"token {TOKENS[0]}, group {GROUP}: row {TOKENS[0]} · {GROUPS} + {GROUP} = {row}"
    ax.text(LEFT - 0.5, TOP + 0.75, words, fontsize=17, color=INK, ha="right")
    ax.text(LEFT - 0.5, TOP + 0.3, "addresses:", fontsize=17, color=INK, ha="right")


def draw_masks(ax):
    """The two masks, what both together load, and zeros elsewhere."""
    for i, token in enumerate(TOKENS):
        for j, number in enumerate(NUMBERS):
            if token < LENGTH and number < STATE:
                corner = LEFT + WIDE * j, TOP - HIGH * (i + 1)
                ax.add_patch(Rectangle(corner, WIDE, HIGH, fc=BLUE, ec=plotting.QUIET, lw=0.8))
            else:
                ax.text(*middle(i, j), "0", color=RED, fontsize=15, ha="center", va="center")
    x = LEFT + WIDE * 16 + 0.35
    words = "loaded where both\nmasks are true:\n10 tokens ×\n8 numbers"
    ax.text(x, TOP - 1.6, words, color=BLUE, fontsize=17)
    ax.text(x, TOP - 3.6, "elsewhere a load\nreturns zeros", color=RED, fontsize=17)


def draw():
    fig, ax = plotting.canvas(12.8, 5.4)
    draw_places(ax)
    draw_addresses(ax)
    drawn = set(ax.get_children())
    draw_masks(ax)
    return fig, [[artist for artist in ax.get_children() if artist not in drawn]]
