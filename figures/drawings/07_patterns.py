"""The sequence mixers of five systems, as letters."""

from cheems_ref import plotting
from cheems_ref.config import SEQUENCE_MIXERS, preset

SYSTEMS = {"LlaMa": "llama-320m", "Mamba-2": "mamba2-320m", "Jamba": "jamba-320m"}
SYSTEMS |= {"Cheems": "cheems-320m", "OTCE": "otce-1b"}
COLOR = dict(zip("SAI", plotting.COLORS, strict=False))


def draw_letters(ax, pattern, x, y, step, size):
    """A row of letters in coloured cells; the first is at (x, y)."""
    for i, letter in enumerate(pattern):
        dark = letter in SEQUENCE_MIXERS
        frame = dict(boxstyle="square,pad=0.28", fc=COLOR[letter], ec="white")
        style = dict(ha="center", va="center", weight="bold", fontsize=size, bbox=frame)
        ax.text(x + step * i, y, letter, color="white" if dark else plotting.INK, **style)


def draw():
    fig, ax = plotting.canvas(12.8, 3.2)
    for row, (name, source) in enumerate(SYSTEMS.items()):
        y, mixers = 2.85 - 0.62 * row, [x for x in preset(source).pattern if x in SEQUENCE_MIXERS]
        ax.text(0.1, y, name, fontsize=16, va="center")
        draw_letters(ax, mixers, 1.7, y, 0.47, 16)
    return fig, []
