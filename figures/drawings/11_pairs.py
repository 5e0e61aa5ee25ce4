"""A pair per slice, and a ring of keys and values: the opening drawing of chapter 11."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting


def draw_slice(ax, x, y, color, tokens=10):
    """A slice of the text: a row of tokens."""
    for i in range(tokens):
        place = (x - 1.1 + 0.22 * i, y)
        ax.add_patch(Rectangle(place, 0.22, 0.5, fc=color, ec="white", alpha=0.75))


def draw_pairs(ax, y):
    """Each rank's pair, and the arrows from each state to the next."""
    for i, color in enumerate(plotting.COLORS[:4]):
        x = 2.9 + 2.8 * i
        draw_slice(ax, x, y, color)
        ax.text(x, y + 0.8, f"rank {i}", ha="center", color=color, fontsize=17)
        plotting.arrow(ax, (x, y - 0.1), (x, y - 0.8), color=color)
        plotting.box(ax, x, y - 1.1, f"$(a_{i},\\ W_{i})$", color=color, fontsize=16)
        if i < 3:
            plotting.arrow(ax, (x + 0.75, y - 1.1), (x + 2.05, y - 1.1), color=plotting.INK)


def draw_ring(ax, y):
    """Ring attention: the keys and values of every slice go to the next rank, and around."""
    for i, color in enumerate(plotting.COLORS[:4]):
        x = 2.9 + 2.8 * i
        for dy, name in ((0.0, "K"), (-0.5, "V")):
            draw_slice(ax, x, y + dy, color)
            ax.text(x - 1.35, y + dy + 0.25, name, ha="center", va="center", fontsize=15)
        if i < 3:
            plotting.arrow(ax, (x + 0.9, y + 0.6), (x + 1.95, y + 0.6), color=color, bend=-0.6)
    plotting.arrow(ax, (11.3, y - 0.6), (2.9, y - 0.6), color=plotting.COLORS[3], bend=-0.13)


def draw():
    fig, ax = plotting.canvas(12.8, 6.6)
    draw_pairs(ax, 5.3)
    ax.text(0.1, 5.2, "a state:\none small\npair each", fontsize=17, va="center")
    ax.text(4.9, 3.55, "a pair is as large for ten tokens as for ten million", fontsize=15)
    draw_ring(ax, 1.75)
    ax.text(0.1, 1.7, "attention:\nkeys and\nvalues go\naround", fontsize=17, va="center")
    ax.text(5.65, 0.15, "keys and values grow with the text", fontsize=15)
    return fig, []
