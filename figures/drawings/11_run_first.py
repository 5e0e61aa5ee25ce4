"""Two ways to run four slices: one after the other, or all at once with a short exchange."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

RUN, STATE, READ = (plotting.COLORS[i] for i in (0, 2, 1))


def bar(ax, rank, start, length, color):
    ax.add_patch(Rectangle((start, 3.4 - rank), length, 0.6, fc=color, ec="white"))


def draw():
    fig, ax = plotting.canvas(12.8, 5.0)
    for rank in range(4):
        ax.text(0.05, 3.7 - rank, f"rank {rank}", va="center", fontsize=18)
        bar(ax, rank, 1.4 + 1.5 * rank, 1.45, RUN)
        bar(ax, rank, 8.3, 1.45, RUN)
        bar(ax, rank, 9.8, 0.4, STATE)
        if rank:
            plotting.arrow(ax, (1.4 + 1.5 * rank, 4.35 - rank), (1.4 + 1.5 * rank, 4.05 - rank),
                           color=STATE)  # fmt: skip
            bar(ax, rank, 10.25, 0.55, READ)
    ax.text(4.4, 4.6, "each waits for the state before it", ha="center", fontsize=18)
    ax.text(10.2, 4.6, "run first, read later", ha="center", fontsize=18)
    for y, text, color in ((3.7, "own slice", RUN), (2.7, "pairs", STATE), (1.7, "reads", READ)):
        ax.text(11.1, y, text, va="center", fontsize=18, color=color)
    for start, end in ((1.4, 7.4), (8.3, 10.9)):
        plotting.arrow(ax, (start, 0.15), (end, 0.15), color=plotting.INK)
    ax.text(7.5, 0.15, "time", va="center", fontsize=16)
    return fig, []
