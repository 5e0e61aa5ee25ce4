"""A chain of states whose links are cut, and the window of a convolution that is left."""

from matplotlib.patches import Circle, Rectangle

from cheems_ref import plotting

TOKENS = ("k₁", "v₁", "k₂", "v₂", "k₃", "v₃", "k₄", "v₄")
STEP = 1.45
SEES = 5  # the token whose convolution is shown


def draw_chain(ax):
    """Tokens below, states above, with a link from state to state; returns the crosses on them."""
    crosses = []
    for i, token in enumerate(TOKENS):
        x = 1.0 + STEP * i
        plotting.box(ax, x, 0.8, token, fontsize=20)
        ax.add_patch(Circle((x, 3.0), 0.36, fc="white", ec=plotting.COLORS[2], lw=3))
        ax.text(x, 3.0, f"$h_{i}$", ha="center", va="center", fontsize=19)
        if i != SEES:
            plotting.arrow(ax, (x, 1.75), (x, 2.6))
        if i:
            ax.plot([x - STEP + 0.42, x - 0.42], [3.0, 3.0], color=plotting.QUIET, lw=2, ls=":")
            style = dict(ha="center", va="center", fontsize=26, color=plotting.COLORS[1])
            crosses.append(ax.text(x - STEP / 2, 3.0, "×", weight="bold", **style))
    words = "every state forgets at once"
    return [*crosses, ax.text(0.6, 3.75, words, color=plotting.COLORS[1], fontsize=18)]


def draw_window(ax, last=SEES, width=4):
    """The tokens that the convolution of one token sees: returns a frame, and words."""
    left, right = 1.0 + STEP * (last - width + 1) - 0.55, 1.0 + STEP * last + 0.55
    box = Rectangle((left, 0.3), right - left, 1.4, fill=False, ec=plotting.COLORS[0], lw=3)
    ax.add_patch(box)
    x = 1.0 + STEP * last
    plotting.arrow(ax, (x, 1.7), (x, 2.6), color=plotting.COLORS[0])
    words = "the convolution of v₃ sees four tokens, and k₃ is one of them"
    style = dict(color=plotting.COLORS[0], ha="right", va="center", fontsize=18)
    return [box, ax.text(right, 0.05, words, **style)]


def draw():
    fig, ax = plotting.canvas(12.2, 4.1)
    crosses = draw_chain(ax)
    return fig, [crosses, draw_window(ax)]
