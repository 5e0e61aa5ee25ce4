"""The lines of `_write`, and what each of them makes: only a piece of the state goes to memory."""

from pathlib import Path

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, _, GREEN, _, ORANGE, SKY = plotting.COLORS
SOURCE = Path(plotting.__file__).with_name("triton_ssd.py")
CELL = 0.115
LINES = (  # how a line begins; rows and columns of what it makes; and what that is
    ("since = _since", (6, 1), BLUE, "log decay since the chunk began"),
    ("to_end = ", (6, 1), BLUE, "decay to the chunk's end"),
    ("V = ", (6, 3), BLUE, "$\\Delta x$, decayed to the end"),
    ("K = _tile(B", (6, 4), BLUE, "16 numbers of $B$ per token"),
    ("write = tl.dot", (4, 3), ORANGE, "$K^\\top V$: a piece of the state"),
    ("tl.store(states", (4, 3), ORANGE, "goes to"),
)
STEP, TOP, PICTURES = 0.82, 4.85, 7.6


def code_of(start):
    """A line of `_write`, without a product's precision and without the sum of an address."""
    body = SOURCE.read_text(encoding="utf-8").partition("def _write(")[2].splitlines()
    line = next(line.strip() for line in body if line.strip().startswith(start))
    line = line.replace(', input_precision="tf32x3"', "")
    address = line[line.find(" + ") : line.find(", write")]
    return line.replace(address, " + …") if start == "tl.store(states" else line


def draw_numbers(ax, y, size, color):
    """A grid of numbers, centred at a height."""
    rows, columns = size
    for i in range(rows):
        for j in range(columns):
            place = PICTURES + CELL * j, y + CELL * (rows / 2 - 1 - i)
            ax.add_patch(Rectangle(place, CELL, CELL, fc=color, ec="white", lw=0.8))


def draw():
    fig, ax = plotting.canvas(12.9, 5.9)
    low = TOP - STEP * (len(LINES) - 1) + STEP / 2
    ax.add_patch(Rectangle((0.1, low), 12.7, 5.35 - low, fc="white", ec=GREEN, lw=3))
    ax.add_patch(Rectangle((0.1, low - 0.98), 12.7, 0.86, fc="white", ec=SKY, lw=3))
    ax.text(0.1, 5.5, "stays in the program", color=GREEN, fontsize=19, weight="bold")
    ax.text(12.6, low - 0.55, "memory", fontsize=19, weight="bold", ha="right", va="center")
    for k, (start, size, color, words) in enumerate(LINES):
        y = TOP - STEP * k - (0.12 if start.startswith("tl.store") else 0)
        ax.text(0.3, y, code_of(start), family="monospace", fontsize=16, va="center")
        draw_numbers(ax, y, size, color)
        ax.text(PICTURES + 0.75, y, words, fontsize=17, va="center")
    return fig, []
