"""Time lines of four ranks, one of which never enters the backward collective."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, RED, GREEN = plotting.COLORS[:3]


def draw_step(ax, rank, start, end, text, color):
    """A bar in a rank's line, with what the rank does there."""
    place, size = (start, 3.6 - rank), (end - start, 0.66)
    ax.add_patch(Rectangle(place, *size, fc=color, ec="white"))
    middle, ink = (start + end) / 2, "white" if color == BLUE else plotting.ON_COLOR
    ax.text(middle, 3.93 - rank, text, ha="center", va="center", fontsize=17, color=ink)


def draw_forward(ax):
    """All ranks run their slice, gather, and add their reads."""
    for rank in range(4):
        ax.text(0.05, 3.93 - rank, f"rank {rank}", va="center", fontsize=18)
        draw_step(ax, rank, 1.1, 2.6, "own slice", BLUE)
        draw_step(ax, rank, 2.65, 4.05, "all_gather", GREEN)
        draw_step(ax, rank, 4.1, 5.6, "add reads", BLUE)
    plotting.arrow(ax, (1.1, 0.3), (10.7, 0.3), color=plotting.INK)
    ax.text(10.8, 0.3, "time", va="center", fontsize=17)


def draw_backward(ax):
    """Ranks 1 to 3 come to the backward collective, and rank 0 doesn't."""
    draw_step(ax, 0, 5.65, 7.85, "whole backward", BLUE)
    ax.text(8.0, 3.93, "done: no collective to enter", va="center", fontsize=17)
    for rank in (1, 2, 3):
        draw_step(ax, rank, 5.65, 7.05, "backward", BLUE)
        draw_step(ax, rank, 7.1, 10.7, "wait for rank 0 ...", RED)


def draw():
    fig, ax = plotting.canvas(11.6, 4.5)
    return fig, plotting.in_stages(ax, draw_forward, draw_backward)
