"""The lines of `_read` that make pairs, and what each of them makes: only y goes to memory."""

from pathlib import Path

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, RED, GREEN, _, _, SKY = plotting.COLORS
SOURCE = Path(plotting.__file__).with_name("triton_ssd.py")
TOKENS, CHANNELS, CELL = 6, 3, 0.115  # of a chunk and of a tile, in the drawing
LINES = (  # how a line begins, and what it makes
    ("scores = tl.dot(", "square", "$CB^\\top$"),
    ("between = ", "square", "log decay from $s$ to $t$"),
    ("L = ", "triangle", "$L$"),
    ("scores = (scores", "triangle", "$L \\circ CB^\\top$, times $\\Delta$"),
    ("out = ", "tile", "a tile of $y$: before,\nfrom states, and pairs"),
    ("tl.store(y", "stored", "$y$ goes to"),
)
STEP, TOP, PICTURES = 0.82, 4.85, 9.1


def code_of(start):
    """A line of `_read`, without the argument for the precision of a product."""
    body = SOURCE.read_text(encoding="utf-8").partition("def _read(")[2].splitlines()
    line = next(line.strip() for line in body if line.strip().startswith(start))
    return line.replace(', input_precision="tf32x3"', "")


def draw_pairs(ax, x, y, kind):
    """A chunk's numbers of pairs, or a tile of y."""
    columns = TOKENS if kind in ("square", "triangle") else CHANNELS
    color = BLUE if columns == TOKENS else RED
    for i in range(TOKENS):
        for j in range(columns):
            full = kind != "triangle" or i >= j
            place = x + CELL * j, y + CELL * (TOKENS / 2 - 1 - i)
            face = color if full else "white"
            ax.add_patch(Rectangle(place, CELL, CELL, fc=face, ec="white", lw=0.8))


def draw():
    fig, ax = plotting.canvas(12.9, 5.9)
    low = TOP - STEP * (len(LINES) - 1) + STEP / 2
    ax.add_patch(Rectangle((0.1, low), 12.7, 5.35 - low, fc="white", ec=GREEN, lw=3))
    ax.add_patch(Rectangle((0.1, low - 0.98), 12.7, 0.86, fc="white", ec=SKY, lw=3))
    ax.text(0.1, 5.5, "stays in the program", color=GREEN, fontsize=19, weight="bold")
    how = dict(fontsize=19, weight="bold", ha="right", va="center")
    ax.text(12.6, low - 0.55, "memory", **how)
    for k, (start, kind, words) in enumerate(LINES):
        y = TOP - STEP * k - (0.12 if kind == "stored" else 0)
        line = code_of(start)
        ax.text(0.3, y, line, family="monospace", fontsize=16, va="center")
        draw_pairs(ax, PICTURES, y, kind)
        ax.text(PICTURES + 0.95, y, words, fontsize=17, va="center")
    return fig, []
