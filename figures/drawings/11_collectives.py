"""What three collectives do to the tensors of three ranks."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

RANKS = [plotting.COLORS[i] for i in (0, 4, 2)]  # a number has the colour of the rank it is from
SUM = "#5a5a5a"  # stays dark on the dark page, where INK turns light
SIDE = 0.5


def number(ax, x, y, value, senders):
    """One number: a square in the colour of its rank, or dark where it sums several ranks'."""
    color = RANKS[senders[0]] if len(senders) == 1 else SUM
    ax.add_patch(Rectangle((x, y), SIDE, SIDE, fc=color, ec="white", lw=2))
    ink = plotting.ON_COLOR if color in RANKS[1:] else "white"
    middle = dict(ha="center", va="center", fontsize=17, color=ink, weight="bold")
    ax.text(x + SIDE / 2, y + SIDE / 2, value, **middle)


def draw_collective(ax, y, name, says, given, got):
    """Rows of ranks: the numbers that each gives, and those that it gets."""
    ax.text(4.35, y + 1.35, name, ha="center", fontsize=19, family="monospace")
    ax.text(4.35, y + 0.4, says, ha="center", va="center", fontsize=17)
    plotting.arrow(ax, (3.1, y + 0.95), (5.6, y + 0.95), color=plotting.INK)
    for rank in range(3):
        low = y + 1.4 - 0.65 * rank
        ax.text(0.05, low + 0.25, f"rank {rank}", va="center", fontsize=17)
        for x, numbers in ((1.3, given[rank]), (6.0, got[rank])):
            for i, (value, senders) in enumerate(numbers):
                number(ax, x + 0.55 * i, low, value, senders)


def draw():
    fig, ax = plotting.canvas(7.8, 7.4)
    everyone = [0, 1, 2]
    own = [[(rank + 1, [rank])] for rank in everyone]
    parts = [[(3 * rank + i + 1, [rank]) for i in everyone] for rank in everyone]
    columns = [[(sum(row[i][0] for row in parts), everyone)] for i in everyone]
    gather = 5.15, "all_gather", "all get all", own, [[row[0] for row in own]] * 3
    scatter = 2.65, "reduce_scatter", "rank $i$: the sum\nof column $i$", parts, columns
    reduce = 0.15, "all_reduce", "all get the sum", own, [[(1 + 2 + 3, everyone)]] * 3
    return fig, plotting.in_stages(
        ax,
        lambda ax: draw_collective(ax, *gather),
        lambda ax: draw_collective(ax, *scatter),
        lambda ax: draw_collective(ax, *reduce),
    )
