"""The rounds of a parallel scan over eight tokens."""

from cheems_ref import plotting


def draw_tree(ax):
    """Which steps each of eight tokens stands for, after each round; returns what a round adds."""
    drawn = [[], [], [], []]  # the start, then three rounds
    for row, reach in enumerate((1, 2, 4)):
        down = [-row, -row - 1]
        for t in range(8):
            drawn[row + 1] += ax.plot([t, t], down, color=plotting.QUIET, linewidth=1)
            if t >= reach:
                color = plotting.COLORS[row]
                drawn[row + 1] += ax.plot([t - reach, t], down, color=color, linewidth=1.8)
    for row, (right, up) in enumerate(((0, 0.2), (0.1, 0.13), (0.1, 0.13), (0, -0.25))):
        drawn[row] += ax.plot(range(8), [-row] * 8, "o", color=plotting.INK, markersize=9)
        for t in range(8):
            span = f"{max(0, t - 2**row + 1)}–{t}" if row and t else f"{t}"
            side = "left" if right else "center"
            drawn[row].append(ax.text(t + right, up - row, span, fontsize=15, ha=side, va="center"))
    rounds = ["start", "round 1: join 1 back", "round 2: join 2 back", "round 3: join 4 back"]
    ax.set_yticks([0, -1, -2, -3], rounds, fontsize=15)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlim=(-0.3, 7.7), ylim=(-3.45, 0.4))
    return [[*new, label] for new, label in zip(drawn, ax.get_yticklabels(), strict=True)][1:]


def draw():
    fig, ax = plotting.figure(size=(10, 5))
    rounds = draw_tree(ax)
    return fig, rounds
