"""What a question finds: keys that attention makes from the tokens alone, and from two tokens."""

from cheems_ref import plotting

TOKENS = ("k₄", "v₄", "k₅", "v₅")
STEP = 1.7


def draw_row(ax):
    """Two pairs and a question, and below each value the key that it has by itself."""
    for i, token in enumerate(TOKENS):
        plotting.box(ax, 0.8 + STEP * i, 2.9, token, fontsize=21)
    plotting.box(ax, 7.9, 2.9, "k₅ → ?", color=plotting.COLORS[1], fontsize=21)
    for i in (1, 3):
        ax.text(0.8 + STEP * i, 2.1, f"“I am {TOKENS[i]}”", ha="center", va="center", fontsize=19)
    ax.text(6.9, 4.05, "who came after k₅?", color=plotting.COLORS[1], fontsize=19, ha="center")


def draw_told(ax):
    """What a layer below adds to the keys, and whom the question then finds."""
    for i in (1, 3):
        x = 0.8 + STEP * i
        plotting.arrow(ax, (x - STEP, 2.45), (x - 0.1, 1.55), color=plotting.COLORS[0], bend=0.2)
        words = f"“{TOKENS[i - 1]} before me”"
        ax.text(x, 1.2, words, ha="center", va="center", fontsize=19, color=plotting.COLORS[0])
    plotting.arrow(ax, (7.7, 3.35), (0.9 + 3 * STEP, 3.35), color=plotting.COLORS[1], bend=0.45)
    words = "a layer below tells each token its neighbour"
    ax.text(0.8 + 2 * STEP, 0.4, words, ha="center", fontsize=19, color=plotting.COLORS[0])


def draw():
    fig, ax = plotting.canvas(8.8, 4.4)
    draw_row(ax)
    return fig, plotting.in_stages(ax, draw_told)
