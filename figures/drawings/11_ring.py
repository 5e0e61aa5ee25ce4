"""Ring attention step by step: whose keys and values each rank holds."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting


def draw():
    fig, ax = plotting.canvas(12.0, 5.5)
    for step in range(4):
        x = 1.9 + 2.55 * step
        ax.text(x + 1.0, 5.15, f"step {step}", ha="center", va="center", fontsize=18)
        for rank in range(4):
            y, held = 3.9 - 1.15 * rank, (rank - step) % 4
            used = held <= rank  # keys of a later slice are hidden from all queries here
            color, pale = plotting.COLORS[0], "#eeeeee"
            ax.add_patch(Rectangle((x, y), 2.0, 0.85, fc=color if used else pale, ec="white"))
            ink = "white" if used else plotting.QUIET
            ax.text(x + 1.0, y + 0.42, f"$K_{held}, V_{held}$", ha="center", va="center",
                    fontsize=19, color=ink)  # fmt: skip
            if step < 3 and rank < 3:
                start, end = (x + 2.05, y + 0.35), (x + 2.5, y - 0.6)
                plotting.arrow(ax, start, end, color=plotting.QUIET)
    for rank in range(4):
        ax.text(0.05, 4.32 - 1.15 * rank, f"rank {rank}", va="center", fontsize=18)
    words = "grey: later slices, masked; rank 3 hands on to rank 0"
    ax.text(6.7, 0.02, words, ha="center", fontsize=17, color=plotting.QUIET)
    return fig, []
