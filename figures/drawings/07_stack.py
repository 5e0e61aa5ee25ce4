"""A Cheems from bytes to logits: the opening drawing of chapter 07."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting
from cheems_ref.config import preset

COLOR = dict.fromkeys("MGDRHCXE", "#dddddd")
COLOR |= dict(S=plotting.COLORS[2], I=plotting.COLORS[5])
CELL = 0.41


def draw_letters(ax, pattern, x, y):
    """A row of letters in coloured cells of one width; the middle of the first is at (x, y)."""
    for i, letter in enumerate(pattern):
        left, ink = x + CELL * (i - 0.5), plotting.ON_COLOR if letter in "SI" else plotting.INK
        ax.add_patch(Rectangle((left, y - 0.24), CELL, 0.48, fc=COLOR[letter], ec="white", lw=2))
        style = dict(ha="center", va="center", weight="bold", fontsize=17)
        ax.text(left + CELL / 2, y, letter, color=ink, **style)


def draw_stack(ax):
    """From bytes to logits, through sixteen letters."""
    draw_letters(ax, preset("cheems-tiny").pattern, 3.3, 3.5)
    for x, words in ((0.4, "bytes"), (1.85, "embedding"), (10.65, "norm"), (11.85, "head")):
        plotting.box(ax, x, 3.5, words)
    for start, end in ((0.8, 1.1), (2.65, 3.0), (9.75, 10.15), (11.1, 11.4), (12.25, 12.55)):
        plotting.arrow(ax, (start, 3.5), (end, 3.5))
    ax.text(12.6, 3.5, "next\nbyte", fontsize=17, va="center")
    words = "seven state layers S, one attention I, and an expert layer E after each"
    ax.text(3.2, 4.1, words, fontsize=17)


def draw_block(ax):
    """One letter opened: the stream, the norm, the layer and the sum."""
    for edge in (2.7, 11.3):
        ax.plot([5.76, edge], [3.25, 2.45], color=plotting.QUIET, lw=1.2, ls=":")
    plotting.arrow(ax, (2.2, 1.95), (12.0, 1.95), color=plotting.INK)
    ax.text(0.2, 1.95, "the stream z,\none vector\nper token", fontsize=17, va="center")
    plotting.arrow(ax, (3.3, 1.95), (4.05, 0.55), bend=0.3)
    ax.text(3.3, 2.2, "a copy leaves", fontsize=17, color=plotting.INK, ha="center")
    plotting.box(ax, 4.75, 0.45, "norm", fontsize=19)
    plotting.arrow(ax, (5.35, 0.45), (5.95, 0.45))
    plotting.box(ax, 7.25, 0.45, "layer: S, I or E", color=plotting.COLORS[2], fontsize=19)
    plotting.arrow(ax, (8.55, 0.55), (9.55, 1.65), bend=0.3)
    style = dict(boxstyle="circle,pad=0.15", fc="white", ec=plotting.INK, lw=1.5)
    ax.text(9.6, 1.95, "+", ha="center", va="center", fontsize=20, bbox=style)
    ax.text(9.95, 2.2, "its result is added", fontsize=17, color=plotting.INK)


def draw():
    fig, ax = plotting.canvas(13.2, 4.4)
    draw_stack(ax)
    return fig, plotting.in_stages(ax, draw_block)
