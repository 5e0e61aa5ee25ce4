"""Fifteen places back stands the next symbol in rows of 16, not in rows of 17. For chapter 00."""

import torch

from cheems_ref import plotting

BLUE, RED, GREEN = plotting.COLORS[:3]
CELL = 0.37
BACK = 15  # from a symbol to the one that came after its copy, with 16 symbols


def draw_row(ax, y, symbols, right, color):
    """Symbols, twice; where the model reads that looks BACK places back, and what is asked."""
    length = len(symbols)
    for place, symbol in enumerate([*symbols, *symbols]):
        again = place >= length
        x = 0.1 + CELL * (place + 0.6 * again)
        ax.text(x + CELL / 2, y, symbol, ha="center", va="center", fontsize=18,
                color=plotting.QUIET if again and place > length + 4 else plotting.INK)  # fmt: skip
    at = length + 4  # the token that has just been read

    def middle(place):
        return 0.1 + CELL * (place + 0.5 + 0.6 * (place >= length))

    plotting.box(ax, middle(at + 1), y + 0.75, "?", color=color, fontsize=18)
    for place, edge in ((at, BLUE), (at - BACK, color)):
        frame = [middle(place) + CELL * side / 2 for side in (-1, 1, 1, -1, -1)]
        ax.plot(frame, [y - 0.3, y - 0.3, y + 0.3, y + 0.3, y - 0.3], color=edge, lw=3)
    plotting.arrow(ax, (middle(at), y + 0.33), (middle(at - BACK), y + 0.33), color=color, bend=0.2)
    words = f"rows of {length}: 15 back stands {right}"
    ax.text(middle((at + at - BACK) / 2), y + 1.62, words, ha="center", fontsize=20, color=color)


def draw():
    fig, ax = plotting.canvas(13.0, 4.9)
    drawn = torch.randperm(26, generator=torch.Generator().manual_seed(3))
    letters = [chr(ord("a") + i) for i in drawn.tolist()]
    draw_row(ax, 2.95, letters[:16], "the next symbol", GREEN)
    wrong = 0.4, letters[:17], "the wrong symbol", RED
    return fig, plotting.in_stages(ax, lambda ax: draw_row(ax, *wrong))
