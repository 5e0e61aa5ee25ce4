"""A tank, a recurrence and a kernel: the opening drawing of chapter 01."""

from cheems_ref import plotting


def draw_views(axes, x, decay=0.6):
    """A tank in three views: its content over time, the recurrence, the echoes that add up."""
    green, orange = plotting.COLORS[2], plotting.COLORS[4]
    h, content = 0.0, []
    for x_t in x:
        h = decay * h + x_t
        content.append(h)
    for ax, title in zip(axes, ("the tank", "the recurrence", "the convolution"), strict=True):
        ax.set(title=title, ylim=(0, 3.1), xlim=(-0.6, len(x) - 0.2), xlabel="step")
    axes[0].bar(range(len(x)), x, 0.4, color=orange, label="inflow")
    axes[0].plot(range(len(x)), content, color=green, label="water in the tank")
    axes[0].legend(loc="upper left", fontsize=16, handlelength=1.4)
    axes[1].plot(range(len(x)), content, "o", color=green, markersize=11)
    for t in range(1, len(x)):
        style = dict(arrowstyle="->", color=plotting.QUIET, lw=1.5, shrinkA=6, shrinkB=6)
        axes[1].annotate("", (t, content[t]), (t - 1, content[t - 1]), arrowprops=style)
    below, shades = [0.0] * len(x), (plotting.COLORS[4], "#f0c766", "#f7e2b0")
    for color, s in zip(shades, (s for s, x_s in enumerate(x) if x_s), strict=True):
        echo = [x[s] * decay ** (t - s) if t >= s else 0.0 for t in range(len(x))]
        above = [low + more for low, more in zip(below, echo, strict=True)]
        axes[2].bar(range(len(x)), echo, 0.62, bottom=below, color=color, label=f"echo of step {s}")
        below = above
    axes[2].plot(range(len(x)), content, "o", color=green, markersize=9)
    axes[2].legend(loc="upper left", fontsize=16, handlelength=1.4)


def draw():
    fig, axes = plotting.figure(1, 3, size=(12, 4.2))
    draw_views(axes, [0, 1, 1, 0, 0, 1, 0, 0])
    return fig, [[axes[1]], [axes[2]]]
