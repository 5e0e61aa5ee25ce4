"""A pair per slice, or a ring of keys and values: the opening drawing of chapter 11."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

TOKENS, STATE, WRITES = (plotting.COLORS[i] for i in (0, 2, 4))
WRITTEN = [  # a state for each rank, 3 × 3; only its size matters here
    [[0.9, 0.2, 0.5], [0.1, 0.7, 0.3], [0.4, 0.6, 0.8]],
    [[0.3, 0.8, 0.1], [0.6, 0.4, 0.9], [0.2, 0.5, 0.3]],
    [[0.5, 0.3, 0.7], [0.9, 0.1, 0.4], [0.6, 0.8, 0.2]],
    [[0.2, 0.6, 0.4], [0.8, 0.5, 0.1], [0.7, 0.3, 0.9]],
]
CENTRES = [3.3, 5.9, 8.5, 11.1]


def draw_slice(ax, x, y, color, tokens=9):
    """A row of a slice: its tokens, or one number of each."""
    for i in range(tokens):
        place = (x - 1.035 + 0.23 * i, y)
        ax.add_patch(Rectangle(place, 0.23, 0.4, fc=color, ec="white", alpha=0.8))


def draw_pairs(ax, y):
    """Each slice writes one small state, which goes to the next rank."""
    for i, x in enumerate(CENTRES):
        ax.text(x, y + 0.6, f"rank {i}", ha="center", fontsize=17)
        draw_slice(ax, x, y, TOKENS)
        plotting.arrow(ax, (x, y - 0.05), (x, y - 0.6), color=plotting.INK)
        ax.text(x - 0.75, y - 1.13, f"$a_{i},$", ha="center", va="center", fontsize=18)
        plotting.state_grid(ax, x - 0.45, y - 1.55, WRITTEN[i], cell=0.3, color=WRITES)
        ax.text(x, y - 1.9, f"$W_{i}$", ha="center", va="center", fontsize=18)
        if i < 3:
            plotting.arrow(ax, (x + 0.6, y - 1.1), (x + 1.55, y - 1.1), color=STATE)


def draw_ring(ax, y):
    """Ring attention: two rows for all tokens of a slice, the keys and the values, go around."""
    for i, x in enumerate(CENTRES):
        draw_slice(ax, x, y, TOKENS)
        draw_slice(ax, x, y - 0.45, TOKENS)
        if i < 3:
            plotting.arrow(ax, (x + 0.5, y + 0.5), (x + 2.1, y + 0.5), color=TOKENS, bend=-0.35)
    ax.text(2.1, y + 0.2, "K", ha="right", va="center", fontsize=17)
    ax.text(2.1, y - 0.25, "V", ha="right", va="center", fontsize=17)
    plotting.arrow(ax, (11.1, y - 0.55), (3.3, y - 0.55), color=TOKENS, bend=-0.1)


def draw():
    fig, ax = plotting.canvas(12.4, 6.6)
    draw_pairs(ax, 5.5)
    ax.text(0.05, 4.7, "a state:\none small\npair each", fontsize=18, va="center")
    ax.text(7.2, 3.05, "as large for ten tokens as for ten million", ha="center", fontsize=18)
    draw_ring(ax, 1.75)
    ax.text(0.05, 1.6, "attention:\nkeys and\nvalues", fontsize=18, va="center")
    ax.text(7.2, 0.12, "they grow with the text", ha="center", fontsize=18)
    return fig, []
