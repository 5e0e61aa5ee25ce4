"""The four steps of the chunked algorithm, each on the matrix it fills in; a block in factors."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, READ, GREEN, _, WRITE, _ = plotting.COLORS
FAINT = "#dcdcdc"
CHUNKS, LENGTH, CELL = 3, 4, 0.2  # three chunks of four tokens
SIDE = CHUNKS * LENGTH * CELL
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
    cell = 0.2
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
        plotting.arrow(ax, (at, y - SIDE - 0.03), (at, y - SIDE - 0.5), color=WRITE)
        grid(ax, at, y - SIDE - 0.85, values, WRITE)


def draw_carry(ax, x, y):
    """From one chunk's end to the next: fade, then add what that chunk wrote."""
    draw_matrix(ax, x, y, {})
    low = y - SIDE - 0.85
    for chunk, values in enumerate(carried()):
        at = middle(x, chunk)
        grid(ax, at, low, values, GREEN)
        plotting.arrow(ax, (at, y - SIDE - 0.03), (at, y - SIDE - 0.5), color=WRITE)
        if chunk:
            plotting.arrow(ax, (at - 0.58, low), (at - 0.22, low), color=GREEN)
            style = dict(ha="center", va="bottom", color=GREEN, fontsize=15)
            ax.text(at - 0.4, low + 0.08, f"$a_{chunk}$", **style)


def draw_read(ax, x, y):
    """The state at a chunk's start feeds all green blocks of its rows."""
    draw_matrix(ax, x, y, {(i, j): GREEN for i in range(CHUNKS) for j in range(i)})
    for chunk, values in enumerate(carried()[:-1], start=1):
        row = y - (chunk + 0.5) * LENGTH * CELL
        grid(ax, x - 0.72, row, values, GREEN)
        plotting.arrow(ax, (x - 0.5, row), (x + 0.12, row), color=READ)


def draw_factors(ax, x, y):
    """A green block as read × carry × write: tall, small, wide. (x, y) is the block's corner."""
    cell, n = 0.24, 2

    def part(left, rows, columns, color, name, shape, on=lambda i, j: True):
        top = y - (LENGTH - rows) * cell / 2
        for i in range(rows):
            for j in range(columns):
                fill = color if on(i, j) else "white"
                corner = left + j * cell, top - (i + 1) * cell
                style = dict(fc=fill, ec=plotting.QUIET, lw=0.8, alpha=0.6)
                ax.add_patch(Rectangle(corner, cell, cell, **style))
        at = left + columns * cell / 2
        ax.text(at, y + 0.12, name, ha="center", va="bottom", color=plotting.INK, fontsize=16)
        ax.text(at, y - LENGTH * cell - 0.1, shape, ha="center", va="top", fontsize=15)
        return left + columns * cell

    def sign(at, text):
        ax.text(at, y - LENGTH * cell / 2, text, ha="center", va="center", fontsize=20)

    end = part(x, LENGTH, LENGTH, GREEN, "a green block", r"$l_c \times l_c$")
    sign(end + 0.75, "=")
    end = part(end + 1.6, LENGTH, n, READ, "read", r"$l_c \times n$")
    sign(end + 0.75, "×")
    end = part(end + 1.4, n, n, GREEN, "carry", r"$n \times n$", on=lambda i, j: i == j)
    sign(end + 0.75, "×")
    part(end + 1.4, n, LENGTH, WRITE, "write", r"$n \times l_c$")


STEPS = {  # title, what is drawn, what is said below
    "1 · inside": (draw_inside, "attention,\nchunk by chunk"),
    "2 · write": (draw_write, "each chunk alone: p × n"),
    "3 · carry": (draw_carry, "fade, then add"),
    "4 · read": (draw_read, "one state for all\nblocks in its rows"),
}


def draw():
    fig, ax = plotting.canvas(13, 6.5)
    for place, (title, (step, words)) in enumerate(STEPS.items()):
        x, y = 0.25 + 3.15 * place + 0.75 * (place == 3), 5.95
        ax.text(x, y + 0.16, title, ha="left", va="bottom", fontsize=18, weight="bold")
        step(ax, x, y)
        low = y - SIDE - (0.2 if place in (0, 3) else 1.25)
        ax.text(x + SIDE / 2, low, words, ha="center", va="top", fontsize=15, color=plotting.INK)
    draw_factors(ax, 2.3, 1.4)
    return fig, []
