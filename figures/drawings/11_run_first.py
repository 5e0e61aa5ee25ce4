"""Two ways to run four slices: one after the other, or all at once with a short exchange."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

RUN, STATE, READ = (plotting.COLORS[i] for i in (0, 2, 1))


def bar(ax, rank, start, length, color):
    ax.add_patch(Rectangle((start, 3.4 - rank), length, 0.6, fc=color, ec="white"))


def draw_one_by_one(ax):
    """Each rank starts when the one before has finished."""
    ax.text(4.4, 4.6, "each waits for the state before it", ha="center", fontsize=18)
    for rank in range(4):
        ax.text(0.05, 3.7 - rank, f"rank {rank}", va="center", fontsize=18)
        x = 1.4 + 1.5 * rank
        bar(ax, rank, x, 1.45, RUN)
        if rank:
            plotting.arrow(ax, (x, 4.35 - rank), (x, 4.05 - rank), color=STATE)
    plotting.arrow(ax, (1.4, 0.15), (7.4, 0.15), color=plotting.INK)
    ax.text(7.45, 0.15, "time", va="center", fontsize=17)


def draw_at_once(ax):
    """All run their slices, exchange pairs, and add their reads."""
    ax.text(10.2, 4.6, "run first, read later", ha="center", fontsize=18)
    for rank in range(4):
        bar(ax, rank, 8.3, 1.45, RUN)
        bar(ax, rank, 9.8, 0.4, STATE)
        if rank:
            bar(ax, rank, 10.25, 0.55, READ)
    for y, text, color in ((3.7, "own slice", RUN), (2.7, "pairs", STATE), (1.7, "reads", READ)):
        ax.text(11.1, y, text, va="center", fontsize=18, color=color)
    plotting.arrow(ax, (8.3, 0.15), (11.0, 0.15), color=plotting.INK)


def draw():
    fig, ax = plotting.canvas(12.4, 5.0)
    return fig, plotting.in_stages(ax, draw_one_by_one, draw_at_once)
