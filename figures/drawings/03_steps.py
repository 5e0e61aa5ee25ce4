"""The four steps of the chunked algorithm, on three chunks."""

from cheems_ref import plotting


def draw_steps(ax):
    """Three chunks as boxes; under each what it writes, between them the state that is carried."""
    blue, red, green = plotting.COLORS[:3]
    frame = dict(boxstyle="round,pad=0.5", fc="white", lw=2)

    def box(x, y, text, color):
        ax.text(x, y, text, ha="center", va="center", bbox=frame | dict(ec=color))

    def arrow(start, end, color, text, place, side):
        style = dict(arrowstyle="-|>", lw=2, mutation_scale=16, color=color)
        ax.annotate("", end, start, arrowprops=style)
        ax.text(*place, text, ha=side, color=color)

    for i, x in enumerate((1.5, 5.5, 9.5)):
        box(x, 2.4, f"chunk {i}\n1: attention inside", blue)
        box(x + 2, 0.5, f"state {i + 1}", green)
        arrow((x + 0.3, 1.8), (x + 1.6, 0.85), green, "2: write", (x + 0.7, 1.1), "right")
        if i:
            arrow((x - 1.6, 0.85), (x - 0.2, 1.8), red, "4: read", (x - 1.2, 1.35), "right")
            arrow((x - 1.3, 0.5), (x + 1.3, 0.5), green, "3: carry", (x, 0.1), "center")
    ax.set(xlim=(0, 12.3), ylim=(-0.1, 3.1))
    ax.axis("off")


def draw():
    fig, ax = plotting.figure(size=(13, 3.6))
    draw_steps(ax)
    return fig, []
