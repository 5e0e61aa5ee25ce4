"""The sequence mixers of nine systems, as letters."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting
from cheems_ref.config import SEQUENCE_MIXERS, expand_pattern, preset

PRESETS = {"LlaMa": "llama-320m", "Mamba-2": "mamba2-320m", "Jamba": "jamba-320m"}
PRESETS |= {"Cheems": "cheems-320m", "OTCE": "otce-1b"}
# From the published configurations; S is any state layer there, and Samba's A sees a window.
SHIPPED = {
    "Nemotron-H": ("SSSSA" + "SSSSSA" * 3 + "SSSSS", "6 : 1"),
    "Granite 4.0": ("SSSSSA" + "SSSSSSSSSA" * 3 + "SSSS", "9 : 1"),
    "Qwen3-Next": (expand_pattern("SSSA × 12"), "3 : 1"),
    "Samba": (expand_pattern("SA × 12"), "1 : 1"),
}
COLOR = dict(zip("ASI", (plotting.COLORS[0], plotting.COLORS[2], plotting.COLORS[5]), strict=True))
CELL = 0.43


def draw_letter(ax, letter, x, y):
    """A letter in a coloured cell whose lower left corner is (x, y)."""
    ax.add_patch(Rectangle((x, y), CELL, 0.46, fc=COLOR[letter], ec="white", lw=2))
    style = dict(ha="center", va="center", weight="bold", fontsize=16)
    color = "white" if letter == "A" else plotting.ON_COLOR
    ax.text(x + CELL / 2, y + 0.22, letter, color=color, **style)


def draw_row(ax, y, name, letters, ratio):
    """The first 24 letters of a system, and how many state layers it has for one of attention."""
    ax.text(0.1, y + 0.22, name, fontsize=17, va="center")
    for i, letter in enumerate(letters[:24]):
        draw_letter(ax, letter, 1.75 + CELL * i, y)
    ax.text(13.05, y + 0.22, ratio, fontsize=17, va="center", ha="right")


def rows():
    """Name, letters of the sequence mixers and ratio of each system."""
    for name, source in PRESETS.items():
        letters = [x for x in preset(source).pattern if x in SEQUENCE_MIXERS]
        states, others = letters.count("S"), len(letters) - letters.count("S")
        ratio = f"{states // others} : 1" if states and others else ""
        yield name, letters, ratio
    for name, (letters, ratio) in SHIPPED.items():
        yield name, letters, ratio


def draw():
    fig, ax = plotting.canvas(13.2, 5.75)
    ax.text(1.75, 5.45, "the first 24 sequence mixers", fontsize=17, va="center")
    ax.text(13.05, 5.45, "S : A, whole model", fontsize=17, va="center", ha="right")
    for i, (name, letters, ratio) in enumerate(rows()):
        draw_row(ax, 4.7 - 0.55 * i - (0.25 if i >= len(PRESETS) else 0), name, letters, ratio)
    return fig, []
