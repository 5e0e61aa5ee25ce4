"""A stream of vectors runs through the model; each layer reads it and adds to it. Chapter 00."""

from cheems_ref import plotting

BLUE, RED, GREEN = plotting.COLORS[:3]
LAYERS = {"S": GREEN, "E": BLUE, "I": RED}
STREAM, FIRST, STEP = 3.0, 2.2, 1.65  # height of the stream, first layer, and from one to the next


def draw_layer(ax, x, letter):
    """A layer below the stream: it reads a normalised copy and adds what it makes of it."""
    plotting.arrow(ax, (x - 0.45, STREAM), (x - 0.45, 1.75), color=LAYERS[letter])
    ax.text(x - 0.36, 2.35, "norm", fontsize=17, va="center", color=plotting.INK)
    plotting.box(ax, x, 1.25, f"  {letter}  ", color=LAYERS[letter], fontsize=24)
    plotting.arrow(ax, (x + 0.45, 1.75), (x + 0.45, STREAM - 0.18), color=LAYERS[letter])
    ax.text(x + 0.45, STREAM, "+", fontsize=24, ha="center", va="center",
            bbox=dict(boxstyle="circle,pad=0.1", fc="white", ec=plotting.INK, lw=2))  # fmt: skip


def draw():
    fig, ax = plotting.canvas(12.7, 3.9)
    ax.plot([0.9, 11.6], [STREAM, STREAM], color=plotting.INK, lw=4, zorder=0)
    ax.text(0.0, STREAM, "bytes", fontsize=20, va="center")
    ax.text(11.75, STREAM, "logits", fontsize=20, va="center")
    words = "the stream: a vector of width 128 per token"
    ax.text(6.2, STREAM + 0.45, words, fontsize=20, ha="center")
    for place, letter in enumerate("SESEIE"):
        draw_layer(ax, FIRST + STEP * place, letter)
    ax.text(6.2, 0.1, "x  ←  x + layer(norm(x))", fontsize=21, ha="center")
    return fig, []
