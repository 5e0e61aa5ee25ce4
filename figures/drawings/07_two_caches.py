"""What S and I keep after 13 tokens, and after 26."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

ROW = 0.085  # the height of a token's key


def draw_state(ax, x):
    """The state and the last inputs of the convolution: the same at any length."""
    grid = [[0.35] * 7 for _ in range(5)]
    plotting.state_grid(ax, x, 1.0, grid, cell=0.22, color=plotting.COLORS[2], largest=1.0)
    ax.text(x + 0.77, 0.7, "state", ha="center", va="center", fontsize=17)
    for i in range(3):
        place = (x + 1.9, 1.0 + 0.14 * i)
        ax.add_patch(Rectangle(place, 0.7, 0.14, fc=plotting.COLORS[2], alpha=0.35, ec="white"))
    ax.text(x + 2.25, 0.7, "3 inputs", ha="center", va="center", fontsize=17)


def draw_keys(ax, x, tokens):
    """A row for each token, in k and in v."""
    for column, name in enumerate(("k", "v")):
        left = x + 0.95 * column
        for i in range(tokens):
            place = (left, 1.0 + ROW * i)
            ax.add_patch(Rectangle(place, 0.8, ROW, fc=plotting.COLORS[0], alpha=0.5, ec="white"))
        ax.text(left + 0.4, 0.7, name, ha="center", va="center", fontsize=17)


def draw():
    fig, ax = plotting.canvas(12.0, 4.2)
    for x, tokens in ((0.6, 13), (6.7, 26)):
        draw_state(ax, x)
        draw_keys(ax, x + 3.3, tokens)
        ax.text(x + 2.5, 3.85, f"after {tokens} tokens", ha="center", fontsize=20, weight="bold")
        ax.text(x + 1.2, 0.2, "S", ha="center", va="center", fontsize=22, weight="bold")
        ax.text(x + 4.2, 0.2, "I", ha="center", va="center", fontsize=22, weight="bold")
    ax.axvline(6.2, color=plotting.QUIET, lw=1)
    return fig, []
