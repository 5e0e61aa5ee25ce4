"""Three ways in which experts share."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

PRIVATE, SHARED, UNUSED = plotting.COLORS[0], plotting.COLORS[2], "#cccccc"
STEP = 0.85  # from one expert to the next


def draw_experts(ax, x, reads, *, bar=False):
    """Four experts around x, two of which are used, between what they read and their sum."""
    for i in range(4):
        place, used = x + STEP * (i - 1.5), i in (0, 2)
        if used:
            plotting.arrow(ax, (x, 1.5), (place, 2.32), color=PRIVATE)
            plotting.arrow(ax, (place, 2.98), (x, 3.85), color=PRIVATE)
        plotting.box(ax, place, 2.65, f"{i + 1}", color=PRIVATE if used else UNUSED, fontsize=19)
    if bar:
        corner = (x - 2.0 * STEP - 0.1, 2.53)
        ax.add_patch(Rectangle(corner, 4 * STEP + 0.2, 0.24, fc=SHARED, alpha=0.6, zorder=0))
        ax.text(x, 0.8, "one V in all four", fontsize=17, ha="center", va="center")
    ax.text(x, 4.0, "+", fontsize=24, ha="center", va="center")
    ax.text(x, 1.25, reads, fontsize=20, ha="center", va="center", style="italic")


def draw():
    fig, ax = plotting.canvas(12.6, 5.0)
    for x, name, place in (
        (1.9, "isolation", "beside them"),
        (6.9, "cohesive", "inside them"),
        (10.8, "expansive", "before them"),
    ):
        ax.text(x, 4.62, name, fontsize=20, ha="center", weight="bold")
        ax.text(x, 4.32, place, fontsize=16, ha="center")
    draw_experts(ax, 1.9, "x")
    draw_experts(ax, 6.9, "x", bar=True)
    draw_experts(ax, 10.8, "z")
    plotting.box(ax, 4.25, 2.65, "$\\mathrm{FFN}^{\\mathrm{s}}$", color=SHARED, fontsize=18)
    plotting.arrow(ax, (2.1, 1.3), (4.05, 2.28), color=SHARED)
    plotting.arrow(ax, (4.05, 3.02), (2.15, 3.97), color=SHARED)
    plotting.box(ax, 10.8, 0.45, "$\\mathrm{FFN}^{\\mathrm{s}}$", color=SHARED, fontsize=18)
    plotting.arrow(ax, (10.8, 0.85), (10.8, 1.08), color=SHARED)
    ax.text(9.3, 0.45, "x", fontsize=20, va="center", ha="center", style="italic")
    plotting.arrow(ax, (9.45, 0.45), (10.15, 0.45), color=SHARED)
    plotting.arrow(ax, (9.25, 0.65), (9.4, 2.3), bend=-0.1)
    for place in (10.8 - 1.5 * STEP, 10.8 + 0.5 * STEP):  # halfway from z to the experts it reaches
        gate = dict(boxstyle="circle,pad=0.2", fc="white", ec=PRIVATE, lw=2)
        middle = (10.8 + place) / 2, 1.91
        ax.text(*middle, "σ", fontsize=15, ha="center", va="center", bbox=gate)
    ax.text(11.55, 1.6, "a gate\neach", fontsize=16, va="center")
    ax.text(9.0, 1.4, "x chooses\nthe experts", fontsize=16, ha="right", va="center")
    return fig, []
