"""What three queries behind a cache of four keys may see, without and with the offset."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

CACHED, NEW, SIDE = 4, 3, 0.58
BLUE, RED = plotting.COLORS[:2]


def draw_mask(ax, x, title, offset):
    """A row per query, a column per key: seen in blue, to be seen but hidden in vermilion."""
    ax.text(x + 2.0, 4.0, title, ha="center", fontsize=20)
    for i in range(NEW):
        y = 2.5 - SIDE * i
        ax.text(x - 0.15, y + 0.28, f"token {CACHED + i}", ha="right", va="center", fontsize=18)
        for key in range(CACHED + NEW):
            sees, may = key <= i + offset, key <= CACHED + i
            color = BLUE if sees else RED if may else "#e6e6e6"
            place = (x + SIDE * key, y)
            ax.add_patch(Rectangle(place, SIDE, SIDE, fc=color, ec="white", lw=2))
    for key in range(CACHED + NEW):
        middle = x + SIDE * (key + 0.5)
        ax.text(middle, 3.3, f"{key}", ha="center", va="center", fontsize=18)
    ax.plot([x, x + SIDE * CACHED - 0.05], [1.15, 1.15], color=plotting.INK)
    ax.text(x + SIDE * CACHED / 2, 0.75, "cached keys", ha="center", fontsize=18)


def draw():
    fig, ax = plotting.canvas(11.2, 4.5)
    draw_mask(ax, 1.3, "with the offset", CACHED)
    draw_mask(ax, 6.9, "without it", 0)
    ax.text(9.0, 0.2, "hidden by mistake", ha="center", fontsize=18, color=RED)
    return fig, []
