"""A tank, a recurrence and a kernel: the opening drawing of chapter 01."""

from cheems_ref import plotting


def draw_views(axes, x, decay=0.6):
    """A tank in three views: its content over time, the recurrence, the kernel that slides."""
    blue, red = plotting.COLORS[:2]
    h, content = 0.0, []
    for x_t in x:
        h = decay * h + x_t
        content.append(h)
    for ax, title in zip(axes, ("the tank", "the recurrence", "the kernel"), strict=True):
        ax.set(title=title, ylim=(0, 2.3), xlim=(-0.6, len(x) - 0.2), xlabel="step")
    axes[0].bar(range(len(x)), x, 0.4, color=red, label="inflow")
    axes[0].plot(range(len(x)), content, color=blue, label="water in the tank")
    axes[0].legend(loc="upper left")
    axes[1].plot(range(len(x)), content, "o", color=blue, markersize=11)
    for t in range(1, len(x)):
        style = dict(arrowstyle="->", color=plotting.QUIET, lw=1.5, shrinkA=6, shrinkB=6)
        axes[1].annotate("", (t, content[t]), (t - 1, content[t - 1]), arrowprops=style)
    for s, x_s in enumerate(x):
        weights = [x_s * decay ** (t - s) for t in range(s, len(x))]
        axes[2].plot(range(s, len(x)), weights, color=red, alpha=0.9, lw=1.8) if x_s else None
    axes[2].plot(range(len(x)), content, "o", color=blue, markersize=7)


def draw():
    fig, axes = plotting.figure(1, 3, size=(13, 3.8))
    draw_views(axes, [0, 1, 1, 0, 0, 1, 0, 0])
    return fig, []
