"""What moves between a fast and a slow memory: the opening drawing of chapter 10."""

from cheems_ref import plotting

BLUE, _, GREEN, _, ORANGE, SKY = plotting.COLORS
HIGH, LOW = 3.45, 1.2  # where the fast memory ends, and the slow one begins
PITCH, GAP = 0.47, 0.31  # between arrows, and between operators
MOVES = {  # r is a read, up, and w is written, down
    "subtract": "ww",
    "to float32": "rrw",
    "mask": "rw",
    "exp": "rw",
    "$CB^\\top$": "¼",  # two reads and two writes of a quarter
    "$\\circ\\,L$": "rw",
    "$\\cdot\\,x$": "r",
}


def draw_memory(ax, left, width, fast, slow):
    """Two boxes: the small fast memory above, the big slow one below."""
    for low, high, words, color in ((HIGH, 4.35, fast, GREEN), (0.1, LOW, slow, SKY)):
        frame = ax.fill([left, left + width, left + width, left], [low, low, high, high])[0]
        frame.set(facecolor="white", edgecolor=color, linewidth=3)
        ax.text(left + width / 2, (low + high) / 2, words, ha="center", va="center", fontsize=18)


def draw_move(ax, x, kind, color=None, thin=False):
    """An arrow: up for a read, down for what is written."""
    ends = (x, LOW + 0.05), (x, HIGH - 0.05)
    start, end = ends if kind == "r" else ends[::-1]
    color = color or (BLUE if kind == "r" else ORANGE)
    style = dict(arrowstyle="-|>", color=color, lw=2 if thin else 4.5, shrinkA=0, shrinkB=0)
    style |= dict(mutation_scale=16 if thin else 26)
    ax.annotate("", end, start, arrowprops=style)


def draw_left(ax):
    """PyTorch's thirteen reads and writes by operator; returns what it drew of the last three."""
    draw_memory(ax, 0.2, 8.6, "processor: fast and small", "memory: slow and big")
    ax.text(4.5, 5.1, "PyTorch: 13 numbers for a pair", ha="center", fontsize=23, weight="bold")
    for x, words, color in ((1.17, "written", ORANGE), (2.42, "read", BLUE)):
        ax.text(x, 2.3, words, fontsize=16, rotation=90, va="center", color=color)
    place = 0.6
    for name, moves in MOVES.items():
        if moves == "¼":
            before = len(ax.texts)  # arrows are texts to matplotlib
            for k, move in enumerate("rw"):
                draw_move(ax, place + 0.25 * k - 0.1, move, thin=True)
            ax.text(place + 0.21, 2.3, "4 × ¼", fontsize=16, rotation=90, va="center")
        else:
            for i, move in enumerate(moves):
                draw_move(ax, place + PITCH * i, move)
        middle = place + PITCH / 2 * (len(moves) - 1)
        ax.text(middle, 4.5, name, ha="center", fontsize=16)
        place += PITCH * len(moves) + GAP
    return ax.texts[before:]


def draw_right(ax):
    """The kernels: what goes in and comes out, and the states, which go both ways."""
    draw_memory(ax, 9.3, 3.6, "the pairs stay here", "memory")
    ax.text(11.1, 5.1, "kernels: 0", ha="center", fontsize=23, weight="bold")
    draw_move(ax, 9.75, "r", plotting.QUIET)
    ax.text(9.9, 2.3, "$x, \\Delta,$\n$B, C$", fontsize=18, va="center")
    draw_move(ax, 11.05, "w", plotting.QUIET)
    ax.text(11.2, 2.3, "$y$", fontsize=18, va="center")
    for x, kind in ((11.75, "w"), (12.05, "r")):
        draw_move(ax, x, kind, GREEN)
    ax.text(12.2, 2.3, "states", fontsize=17, va="center", color=GREEN, rotation=90)


def draw():
    fig, ax = plotting.canvas(13, 5.6)
    last, before, frames = draw_left(ax), len(ax.texts), len(ax.patches)
    draw_right(ax)
    return fig, [last, [*ax.texts[before:], *ax.patches[frames:]]]
