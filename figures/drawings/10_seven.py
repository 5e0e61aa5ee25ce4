"""The seven trips of a chunk's state between memory and registers, by the line that makes them."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

_, _, GREEN, _, _, SKY = plotting.COLORS
HIGH, LOW = 3.25, 1.0  # where the registers end, and memory begins
STEPS = (  # from x to x; r is a read, up, and w is written, down; the line, and its step
    (0.3, 3.5, "w", "B.mT @ V", "step 2: write"),
    (3.8, 7.7, "rrw", "torch.addcmul", "step 3: carry"),
    (8.0, 10.05, "rw", "torch.stack", "step 4: read"),
    (10.05, 12.6, "r", "C @ states", ""),
)


def draw_step(ax, left, right, moves, line, step):
    """A line's box of registers, with an arrow and a state for each number that it moves."""
    size = right - left, 0.75
    ax.add_patch(Rectangle((left, HIGH), *size, fc="white", ec=plotting.INK, lw=2))
    how = dict(ha="center", va="center", fontsize=18)
    middle = (left + right) / 2
    ax.text(middle, HIGH + 0.37, line, family="monospace", **how)
    ax.text(left, HIGH + 1.0, step, fontsize=20, weight="bold")
    pitch = 1.05
    for i, move in enumerate(moves):
        x = middle + pitch * (i - (len(moves) - 1) / 2)
        ends = (x, LOW + 0.05), (x, HIGH - 0.05)
        start, end = ends if move == "r" else ends[::-1]
        style = dict(arrowstyle="-|>", color=GREEN, lw=5, mutation_scale=28, shrinkA=0, shrinkB=0)
        ax.annotate("", end, start, arrowprops=style)
        values = [[(3 * r + 5 * c + 2) % 7 / 7 + 0.2 for c in range(3)] for r in range(3)]
        plotting.state_grid(ax, x + 0.12, 1.9, values, cell=0.18)


def draw():
    fig, ax = plotting.canvas(12.9, 4.75)
    for step in STEPS:
        draw_step(ax, *step)
    ax.add_patch(Rectangle((0.3, 0.05), 12.3, LOW - 0.05, fc="white", ec=SKY, lw=3))
    words = "memory: seven times the state of a head, $p \\times n$ numbers, for every chunk"
    ax.text(6.45, (LOW + 0.05) / 2, words, ha="center", va="center", fontsize=19)
    return fig, []
