"""Three ways in which experts share."""

from cheems_ref import plotting


def draw_experts(ax, x, y, colors, inside=""):
    """Four experts, two of which are used, and their sum."""
    for i, color in enumerate(colors):
        place = x + 0.72 * (i - 1.5)
        used = i in (0, 2)
        plotting.box(ax, place, y, f"{i + 1}", color=color if used else "#dddddd")
        if used:
            plotting.arrow(ax, (x, y - 1.0), (place, y - 0.4))
            plotting.arrow(ax, (place, y + 0.4), (x, y + 1.0))
    ax.text(x, y + 1.2, "+", fontsize=18, ha="center", va="center")
    ax.text(x, y - 1.2, inside, fontsize=15, ha="center", va="center")


def draw_sharing(ax, private=plotting.COLORS[0], shared=plotting.COLORS[1]):
    """Three routed layers, and where each has what all tokens or all experts use."""
    for x, name in ((2.0, "isolation"), (6.4, "cohesive"), (10.6, "expansive")):
        ax.text(x, 4.45, name, fontsize=17, ha="center")
        draw_experts(ax, x, 2.5, [private] * 4, "z" if name == "expansive" else "x")
    plotting.box(ax, 4.15, 2.5, "$\\mathrm{FFN}^{\\mathrm{s}}$", color=shared)
    plotting.arrow(ax, (2.2, 1.4), (4.0, 2.05), color=shared)
    plotting.arrow(ax, (4.0, 2.95), (2.25, 3.65), color=shared)
    ax.plot([5.1, 7.75], [2.5, 2.5], color=shared, lw=7, alpha=0.5, zorder=0)
    ax.text(7.85, 2.5, "one V", fontsize=15, color=shared, va="center")
    plotting.box(ax, 10.6, 0.55, "$\\mathrm{FFN}^{\\mathrm{s}}$", color=shared)
    plotting.arrow(ax, (10.6, 0.9), (10.6, 1.15), color=shared)
    ax.text(9.55, 0.55, "x", fontsize=15, va="center", ha="center")
    plotting.arrow(ax, (9.7, 0.55), (10.05, 0.55))


def draw():
    fig, ax = plotting.canvas(12.6, 4.9)
    draw_sharing(ax)
    return fig, []
