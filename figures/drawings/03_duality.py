"""A chain of states and a matrix in blocks: the opening drawing of chapter 03."""

from matplotlib.patches import Circle, Rectangle

from cheems_ref import plotting


def draw_chain(ax, lit, l=8):
    """States in a row; the path from the token that writes to the token that reads is lit."""
    s, t = lit
    for i in range(l):
        on = s <= i <= t
        color = plotting.COLORS[1] if on else plotting.QUIET
        ax.add_patch(Circle((i, 1), 0.3, fc="white", ec=color, lw=3 if on else 1.5))
        ax.text(i, 1, f"$h_{i}$", ha="center", va="center")
        arrows = [((i, 0.2), (i, 0.68), i == s), ((i, 1.32), (i, 1.8), i == t)]
        arrows += [((i + 0.32, 1), (i + 0.68, 1), s <= i < t)] * (i + 1 < l)
        for start, end, used in arrows:
            style = dict(
                color=plotting.COLORS[1] if used else plotting.QUIET, lw=3 if used else 1.2
            )
            ax.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", **style))
        ax.text(i, -0.05, f"$x_{i}$", ha="center", va="center")
        ax.text(i, 2.05, f"$y_{i}$", ha="center", va="center")
    ax.set(xlim=(-0.5, l - 0.5), ylim=(-0.4, 2.4), aspect="equal")
    ax.axis("off")


def draw_blocks(ax, lit, l=8, l_c=4):
    """The lower triangle of M, cut into blocks: attention on the diagonal, the state below it."""
    for t in range(l):
        for s in range(t + 1):
            color = plotting.COLORS[0] if t // l_c == s // l_c else plotting.COLORS[2]
            ax.add_patch(Rectangle((s, t), 1, 1, fc=color, ec="white", alpha=0.35))
    s, t = lit
    ax.add_patch(Rectangle((s, t), 1, 1, fc=plotting.COLORS[1], ec="white"))
    for place, text in (
        ((0, l + 0.75), "source s"),
        ((l + 1.1, 1.55), "inside a chunk:\nattention"),
        ((l + 1.1, 5.8), "between chunks:\nthe state"),
    ):
        ax.text(*place, text, ha="left", va="center", color=plotting.INK)
    for place, color in ((1.5, plotting.COLORS[0]), (5.8, plotting.COLORS[2])):
        ax.add_patch(Rectangle((l + 0.1, place - 0.35), 0.7, 0.7, fc=color, alpha=0.35))
    ax.text(-0.35, 4, "target t", rotation=90, ha="right", va="center")
    ax.set(xlim=(-1, l + 5.2), ylim=(l + 1.3, -0.2), aspect="equal")
    ax.axis("off")


def draw():
    fig, axes = plotting.figure(1, 2, size=(13, 4))
    axes[0].get_gridspec().set_width_ratios([3, 2])
    draw_chain(axes[0], (2, 6))
    draw_blocks(axes[1], (2, 6))
    axes[0].set_title("a recurrence: token by token", loc="left")
    axes[1].set_title("a matrix: all at once", loc="left")
    return fig, [[axes[1]]]
