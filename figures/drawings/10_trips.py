"""What moves between a fast and a slow memory: the opening drawing of chapter 10."""

from cheems_ref import plotting


def draw_memory(ax, left, width, fast, slow):
    """Two boxes: the small fast memory above, the big slow one below."""
    for low, high, words, color in ((4.0, 5.0, fast, 2), (0.3, 1.6, slow, 5)):
        frame = ax.fill([left, left + width, left + width, left], [low, low, high, high])[0]
        frame.set(facecolor="white", edgecolor=plotting.COLORS[color], linewidth=2.5)
        ax.text(left + width / 2, (low + high) / 2, words, ha="center", va="center", fontsize=15)


def draw_left(ax):
    """PyTorch's thirteen reads and writes by operator; returns what it drew of the last three."""
    draw_memory(ax, 0.25, 8.2, "fast and small: the processor", "slow and big: memory")
    ax.text(4.35, 5.85, "PyTorch: 13 reads and writes for every pair", ha="center", fontsize=17)
    made = {"subtract": "ww", "to float32": "rrw", "mask": "rw", "exp": "rw"}  # r up, w down
    made |= {"$CB^\\top$": "¼", "$\\circ\\,L$": "rw", "$\\cdot\\,x$": "r"}
    place = 0.7
    for name, moves in made.items():
        if name == "$CB^\\top$":
            before = len(ax.texts)  # arrows are texts to matplotlib
        for i, move in enumerate(moves):
            ends = [(place + 0.48 * i, y) for y in ((1.65, 3.95) if move == "r" else (3.95, 1.65))]
            plotting.arrow(ax, *ends, color=plotting.COLORS[3 if move == "¼" else move == "w"])
            if move == "¼":  # both ways
                plotting.arrow(ax, *ends[::-1], color=plotting.COLORS[3])
                ax.text(ends[0][0] + 0.08, 2.6, "4 ×\n¼", fontsize=15)
        ax.text(place + 0.24 * (len(moves) - 1), 5.12, name, ha="center", fontsize=13.5)
        place += 0.48 * len(moves) + 0.22
    return ax.texts[before:]


def draw_right(ax):
    """The kernels: what goes in and comes out, and the states, which go both ways."""
    draw_memory(ax, 9.2, 3.5, "$L$, $CB^\\top$, and their\nproduct live and die here", "memory")
    ax.text(10.95, 5.85, "kernels: none for a pair", ha="center", fontsize=17)
    up, down = (1.65, 3.95), (3.95, 1.65)
    arrows = {9.6: (up, "$x, \\Delta, B, C$"), 11.0: (down, "$y$")}
    arrows |= {11.5: (down, ""), 11.75: (up, "states")}
    for x, (ends, words) in arrows.items():
        plotting.arrow(ax, *((x, y) for y in ends), color=plotting.QUIET)
        ax.text(x + 0.1, 2.8, words, fontsize=14)


def draw():
    fig, ax = plotting.canvas(13, 6.2)
    last, before, frames = draw_left(ax), len(ax.texts), len(ax.patches)
    draw_right(ax)
    return fig, [last, [*ax.texts[before:], *ax.patches[frames:]]]
