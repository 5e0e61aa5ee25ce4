"""What moves between a fast and a slow memory: the opening drawing of chapter 10."""

from cheems_ref import plotting

BLUE, _, GREEN, _, ORANGE, SKY = plotting.COLORS
HIGH, LOW = 3.45, 1.2  # where the fast memory ends, and the slow one begins
PITCH, THIN, GAP = 0.46, 0.27, 0.28  # between arrows, after a thin one, and between operators
MOVES = {  # R is a read, up, and W is written, down; r and w are a quarter: four heads share them
    "subtract": "WW",
    "to float32": "RRW",
    "mask": "RW",
    "exp": "RW",
    "$CB^\\top$": "wrw",  # the product writes it, and its mask reads and writes
    "$\\circ\\,L$": "rRW",
    "$\\cdot\\,x$": "R",
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
    start, end = ends if kind in "rR" else ends[::-1]
    color = color or (BLUE if kind in "rR" else ORANGE)
    style = dict(arrowstyle="-|>", color=color, lw=2 if thin else 4.5, shrinkA=0, shrinkB=0)
    style |= dict(mutation_scale=16 if thin else 26)
    ax.annotate("", end, start, arrowprops=style)


def draw_left(ax):
    """PyTorch's thirteen reads and writes by operator; returns what it drew of the last three."""
    draw_memory(ax, 0.2, 8.85, "processor: fast and small", "memory: slow and big")
    words = "PyTorch: 13 numbers per pair and head"
    ax.text(4.5, 5.1, words, ha="center", fontsize=23, weight="bold")
    for x, words, color in ((1.17, "written", ORANGE), (2.42, "read", BLUE)):
        ax.text(x, 2.3, words, fontsize=18, rotation=90, va="center", color=color)
    place = 0.6
    for name, moves in MOVES.items():
        if name == "$CB^\\top$":
            before = len(ax.texts)  # arrows are texts to matplotlib
        first = place
        for move in moves:
            draw_move(ax, place, move, thin=move in "rw")
            last, place = place, place + (THIN if move in "rw" else PITCH)
        if name == "$CB^\\top$":
            ax.text(last + 0.08, 2.3, "¼ each", fontsize=18, rotation=90, va="center")
        ax.text((first + last) / 2, 4.5, name, ha="center", fontsize=18)
        place += GAP
    return ax.texts[before:]


def draw_right(ax):
    """The kernels: what goes in and comes out, and the states, which go both ways."""
    draw_memory(ax, 9.45, 3.4, "the pairs stay here", "memory")
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
