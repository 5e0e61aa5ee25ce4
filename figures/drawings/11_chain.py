"""Who sends how many pairs: a gather in one step, or a chain in three."""

from cheems_ref import plotting

STATE = plotting.COLORS[2]


def dots(ax, x, name):
    ax.text(x, 4.55, name, ha="center", fontsize=17, color=plotting.QUIET)
    for rank in range(4):
        plotting.box(ax, x, 3.75 - 1.05 * rank, f"{rank}", fontsize=18, color=plotting.COLORS[0])


def draw_gather(ax):
    """Every rank sends its pair to the three others."""
    ax.text(2.3, 5.1, "gather: 1 step, 3 pairs from each", ha="center", fontsize=18)
    dots(ax, 0.9, "ranks")
    dots(ax, 3.9, "step 1")
    for sender in range(4):
        for receiver in set(range(4)) - {sender}:
            start, end = (1.3, 3.75 - 1.05 * sender), (3.5, 3.75 - 1.05 * receiver)
            plotting.arrow(ax, start, end, color=STATE)


def draw_chain(ax):
    """Each rank sends one pair, once it has one from its neighbour."""
    ax.text(8.4, 5.1, "chain: 3 steps, at most 1 pair from each", ha="center", fontsize=18)
    for step in range(4):
        x = 5.9 + 1.7 * step
        dots(ax, x, f"step {step}" if step else "ranks")
        if step < 3:
            y = 3.75 - 1.05 * step
            plotting.arrow(ax, (x + 0.4, y), (x + 1.3, y - 1.05), color=STATE)


def draw():
    fig, ax = plotting.canvas(11.6, 5.4)
    return fig, plotting.in_stages(ax, draw_gather, draw_chain)
