"""The four steps of the chunked algorithm, each on the matrix it fills in; a block in factors.

A strip of five panels, which fits below the code of a slide and grows by a panel at a time.
"""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, READ, GREEN, _, WRITE, _ = plotting.COLORS
FAINT = "#dcdcdc"
CHUNKS, LENGTH, CELL = 3, 4, 0.17  # three chunks of four tokens
SIDE = CHUNKS * LENGTH * CELL
STATES = 0.8  # the middle of the states below a matrix, from its lower edge
WRITES = [  # what each chunk writes: a state with p = 3 rows and n = 2 columns
    [[0.9, 0.2], [0.4, 0.7], [0.1, 0.5]],
    [[0.1, 0.6], [0.8, 0.1], [0.3, 0.4]],
    [[0.5, 0.3], [0.2, 0.9], [0.7, 0.2]],
]
DECAY = 0.4


def carried():
    """The state after each chunk: fade the one before, add what the chunk wrote."""
    states = WRITES[:1]
    for write in WRITES[1:]:
        rows = zip(states[-1], write, strict=True)
        states.append([[DECAY * a + b for a, b in zip(*row, strict=True)] for row in rows])
    return states


def draw_matrix(ax, x, y, lit):
    """The lower triangle of M with its upper left corner at (x, y); `lit` gives blocks a colour."""
    for t in range(CHUNKS * LENGTH):
        for s in range(t + 1):
            color = lit.get((t // LENGTH, s // LENGTH), FAINT)
            shade = dict(fc=color, ec="white", lw=0.7, alpha=0.55 if color != FAINT else 1.0)
            ax.add_patch(Rectangle((x + s * CELL, y - (t + 1) * CELL), CELL, CELL, **shade))
    for border in range(1, CHUNKS):
        at = border * LENGTH * CELL
        ax.plot([x + at, x + at], [y - at, y - SIDE], color="white", lw=3)
        ax.plot([x, x + at], [y - at, y - at], color="white", lw=3)


def grid(ax, x, y, values, color):
    """A state, its middle at (x, y)."""
    cell = 0.18
    left, low = x - cell * len(values[0]) / 2, y - cell * len(values) / 2
    plotting.state_grid(ax, left, low, values, cell=cell, color=color, largest=1.1)


def middle(x, chunk):
    """The middle of a chunk's columns in a matrix whose left edge is at x."""
    return x + (chunk + 0.5) * LENGTH * CELL


def draw_inside(ax, x, y):
    draw_matrix(ax, x, y, {(i, i): BLUE for i in range(CHUNKS)})


def draw_write(ax, x, y):
    """The columns of each chunk flow down into the state that it writes."""
    draw_matrix(ax, x, y, {(i, j): WRITE for i in range(CHUNKS) for j in range(i + 1)})
    for chunk, values in enumerate(WRITES):
        at = middle(x, chunk)
        plotting.arrow(ax, (at, y - SIDE - 0.02), (at, y - SIDE - 0.48), color=WRITE)
        grid(ax, at, y - SIDE - STATES, values, WRITE)


def draw_carry(ax, x, y):
    """From one chunk's end to the next: fade, then add what that chunk wrote."""
    draw_matrix(ax, x, y, {})
    low = y - SIDE - STATES
    for chunk, values in enumerate(carried()):
        at = middle(x, chunk)
        grid(ax, at, low, values, GREEN)
        plotting.arrow(ax, (at, y - SIDE - 0.02), (at, y - SIDE - 0.48), color=WRITE)
        if chunk:
            plotting.arrow(ax, (at - 0.52, low), (at - 0.16, low), color=GREEN)
            style = dict(ha="center", va="bottom", color=GREEN, fontsize=15)
            ax.text(at - 0.35, low + 0.09, f"$a_{chunk}$", **style)


def draw_read(ax, x, y):
    """The state at a chunk's start feeds all green blocks of its rows."""
    draw_matrix(ax, x, y, {(i, j): GREEN for i in range(CHUNKS) for j in range(i)})
    for chunk, values in enumerate(carried()[:-1], start=1):
        row = y - (chunk + 0.5) * LENGTH * CELL
        grid(ax, x - 0.6, row, values, GREEN)
        plotting.arrow(ax, (x - 0.4, row), (x + 0.12, row), color=READ)


def draw_part(ax, at, top, rows, columns, color, diagonal):
    """A factor, its upper edge's middle at (at, top); of a diagonal one only these cells."""
    for i in range(rows):
        for j in range(columns):
            corner = at + (j - columns / 2) * CELL, top - (i + 1) * CELL
            fill = color if i == j or not diagonal else "white"
            style = dict(fc=fill, ec=plotting.QUIET, lw=0.8, alpha=0.6)
            ax.add_patch(Rectangle(corner, CELL, CELL, **style))


def draw_factors(ax, x, y):
    """A green block is read × carry × write: tall, small, wide."""
    high, n = LENGTH * CELL, 2
    draw_part(ax, x + 1.2, y, LENGTH, LENGTH, GREEN, False)
    ax.text(x + 1.75, y - high / 2, r"$l_c \times l_c$", va="center", fontsize=15)
    ax.text(x + 1.2, y - high - 0.26, "=", ha="center", va="center", fontsize=20)
    top = y - high - 0.55
    for place, (name, rows, columns, color, shape) in enumerate(
        (
            ("read", LENGTH, n, READ, r"$l_c \times n$"),
            ("carry", n, n, GREEN, r"$n \times n$"),
            ("write", n, LENGTH, WRITE, r"$n \times l_c$"),
        )
    ):
        at = x + 0.3 + 0.9 * place
        draw_part(ax, at, top - (LENGTH - rows) * CELL / 2, rows, columns, color, name == "carry")
        words = dict(ha="center", va="top", color=plotting.INK, fontsize=15)
        ax.text(at, top - high - 0.12, name, **words)
        ax.text(at, top - high - 0.45, shape, **words)
        if place:
            left = at - columns * CELL / 2
            ax.text(left - 0.24, top - high / 2, "×", ha="center", va="center", fontsize=20)


STEPS = {  # title, where it stands, what is drawn, what is said below
    "1 · inside": (0.15, draw_inside, "attention,\nchunk by chunk"),
    "2 · write": (2.65, draw_write, "each alone: p × n"),
    "3 · carry": (5.15, draw_carry, "fade, then add"),
    "4 · read": (8.3, draw_read, "one state for all\nblocks in its rows"),
    "a green block": (10.65, draw_factors, ""),
}


def draw():
    fig, ax = plotting.canvas(13.25, 3.95)
    y, stages = 3.5, []
    for title, (x, step, words) in STEPS.items():
        drawn = set(ax.get_children())
        ax.text(x, y + 0.14, title, ha="left", va="bottom", fontsize=18, weight="bold")
        step(ax, x, y)
        low = y - SIDE - (1.14 if step in (draw_write, draw_carry) else 0.2)
        ax.text(x + SIDE / 2, low, words, ha="center", va="top", fontsize=15, color=plotting.INK)
        stages.append([artist for artist in ax.get_children() if artist not in drawn])
    return fig, stages[1:]
