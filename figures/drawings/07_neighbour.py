"""What a question finds: keys that attention makes from the tokens alone, and from two tokens."""

from cheems_ref import plotting

TOKENS = ("k₁", "v₁", "k₂", "v₂", "k₃", "v₃")
STEP = 1.5


def added(ax, before):
    """What was drawn since, each arrow with the patch that is its line."""
    new = [artist for artist in ax.get_children() if artist not in before]
    arrows = (getattr(artist, "arrow_patch", None) for artist in new)
    return new + [arrow for arrow in arrows if arrow is not None]


def draw_row(ax):
    """Three pairs and a question, and below each value the key that it has by itself."""
    for i, token in enumerate(TOKENS):
        plotting.box(ax, 1.2 + STEP * i, 2.9, token, fontsize=21)
    plotting.box(ax, 11.0, 2.9, "k₂ → ?", color=plotting.COLORS[1], fontsize=21)
    for i in (1, 3, 5):
        ax.text(1.2 + STEP * i, 2.1, f"“I am {TOKENS[i]}”", ha="center", va="center", fontsize=19)
    ax.text(10.4, 3.8, "who came after k₂?", color=plotting.COLORS[1], fontsize=19, ha="center")


def draw_told(ax):
    """What a layer below adds to the keys, and whom the question then finds."""
    before = set(ax.get_children())
    for i in (1, 3, 5):
        x = 1.2 + STEP * i
        plotting.arrow(ax, (x - STEP, 2.45), (x - 0.1, 1.55), color=plotting.COLORS[0], bend=0.2)
        words = f"“{TOKENS[i - 1]} before me”"
        ax.text(x, 1.2, words, ha="center", va="center", fontsize=19, color=plotting.COLORS[0])
    plotting.arrow(ax, (10.1, 3.3), (1.2 + 3 * STEP, 3.45), color=plotting.COLORS[1], bend=0.25)
    words = "a layer below tells each token its neighbour"
    ax.text(1.2 + 3 * STEP, 0.4, words, ha="center", fontsize=19, color=plotting.COLORS[0])
    return added(ax, before)


def draw():
    fig, ax = plotting.canvas(12.6, 4.6)
    draw_row(ax)
    return fig, [draw_told(ax)]
