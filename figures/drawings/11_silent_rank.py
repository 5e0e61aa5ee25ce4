"""Time lines of four ranks, one of which never enters the backward collective."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting


def draw_step(ax, rank, start, end, text, color, **options):
    """A bar in a rank's line, with what the rank does there."""
    place, size = (start, 3.65 - rank), (end - start, 0.55)
    ax.add_patch(Rectangle(place, *size, fc=color, ec=color, **options))
    middle = (start + end) / 2
    ax.text(middle, 3.92 - rank, text, ha="center", va="center", fontsize=15, color="white")


def draw_waiting(ax, last=11.3):
    """Four ranks: all gather together, but only ranks 1 to 3 come to the backward collective."""
    blue, red, green = plotting.COLORS[:3]
    for rank in range(4):
        ax.text(0.1, 3.92 - rank, f"rank {rank}", va="center", fontsize=16)
        draw_step(ax, rank, 1.3, 3.3, "own slice", blue)
        draw_step(ax, rank, 3.4, 5.0, "all_gather", green)
        draw_step(ax, rank, 5.1, 6.5, "add reads", blue)
        if rank:
            draw_step(ax, rank, 6.6, 7.9, "backward", blue)
            draw_step(ax, rank, 8.0, last, "wait for rank 0 ...", red)
        else:
            draw_step(ax, rank, 6.6, 9.1, "whole backward", blue)
            ax.text(9.3, 3.92, "done: no collective to enter", va="center", fontsize=15)


def draw():
    fig, ax = plotting.canvas(12.8, 4.6)
    draw_waiting(ax)
    plotting.arrow(ax, (1.3, 0.3), (12.2, 0.3), color=plotting.INK)
    ax.text(12.3, 0.3, "time", va="center", fontsize=15)
    return fig, []
