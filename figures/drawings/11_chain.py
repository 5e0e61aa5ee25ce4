"""Who sends how many pairs: a gather in one step, or a chain in three."""

from cheems_ref import plotting

STATE = plotting.COLORS[2]


def dots(ax, x, y):
    for rank in range(4):
        plotting.box(ax, x, y - 1.1 * rank, f"{rank}", fontsize=18, color=plotting.COLORS[0])


def draw():
    fig, ax = plotting.canvas(12.8, 5.4)
    dots(ax, 0.7, 4.2)
    dots(ax, 4.3, 4.2)
    for sender in range(4):
        for receiver in set(range(4)) - {sender}:
            start, end = (1.1, 4.2 - 1.1 * sender), (3.9, 4.2 - 1.1 * receiver)
            plotting.arrow(ax, start, end, color=STATE)
    for step in range(4):
        dots(ax, 6.6 + 1.8 * step, 4.2)
        if step < 3:
            start = (7.0 + 1.8 * step, 4.2 - 1.1 * step)
            plotting.arrow(ax, start, (8.0 + 1.8 * step, 3.1 - 1.1 * step), color=STATE)
    ax.text(2.5, 5.05, "gather: 1 step, 3 pairs from each", ha="center", fontsize=18)
    ax.text(9.3, 5.05, "chain: 3 steps, at most 1 pair from each", ha="center", fontsize=18)
    return fig, []
