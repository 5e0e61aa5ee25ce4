"""The Mamba layer of equation 1.12, with the width of everything that flows. For chapter 01."""

from cheems_ref import plotting
from cheems_ref.plotting import arrow, box

BLUE, RED, GREEN = plotting.COLORS[:3]
MAIN, GATE, TOKEN = 3.0, 4.4, 1.15  # y of the path through the scan, the gate, what the token says


def label(ax, x, y, words, color=plotting.INK):
    ax.text(x, y, words, ha="center", va="center", fontsize=17, color=color)


def draw_main_path(ax):
    """x, the short convolution, the scan, the way out."""
    label(ax, 0.35, MAIN, "$x$")
    arrow(ax, (0.6, MAIN), (1.3, MAIN))
    label(ax, 0.9, MAIN - 0.3, "$d$", BLUE)
    box(ax, 1.75, MAIN, "$W_x$", fontsize=18)
    arrow(ax, (2.2, MAIN), (2.95, MAIN))
    label(ax, 2.55, MAIN - 0.3, "$2d$", BLUE)
    box(ax, 3.95, MAIN, "conv of 4,\nSiLU", color=BLUE, fontsize=17)
    arrow(ax, (4.85, MAIN), (7.15, MAIN))
    label(ax, 5.15, MAIN + 0.3, "$u$")
    label(ax, 6.5, MAIN - 0.3, "$2d$", BLUE)
    box(ax, 8.05, MAIN, "scan with $A$,\nplus $D \\circ u$", color=GREEN, fontsize=17)
    arrow(ax, (9.2, MAIN), (10.1, MAIN), color=GREEN)
    label(ax, 9.65, MAIN - 0.3, "$2d$", BLUE)
    box(ax, 10.4, MAIN, "∘", color=RED, fontsize=18)
    arrow(ax, (10.75, MAIN), (11.35, MAIN))
    box(ax, 11.8, MAIN, "$W_o$", fontsize=18)
    arrow(ax, (12.25, MAIN), (12.95, MAIN))
    label(ax, 12.55, MAIN - 0.3, "$d$", BLUE)
    label(ax, 13.15, MAIN, "$y$")


def draw_token_s_choice(ax):
    """What u decides: step size, key and query of the scan."""
    arrow(ax, (5.6, MAIN - 0.05), (5.6, TOKEN + 0.4))
    box(ax, 5.6, TOKEN, "$W$", fontsize=18)
    arrow(ax, (5.95, TOKEN + 0.2), (7.5, MAIN - 0.6))
    label(ax, 6.25, TOKEN + 1.0, "$B, C$")
    label(ax, 7.5, TOKEN + 0.6, "$n$ each", BLUE)
    arrow(ax, (5.95, TOKEN - 0.1), (7.1, TOKEN - 0.45))
    label(ax, 6.3, TOKEN - 0.62, "$\\eta$, a few")
    box(ax, 8.3, TOKEN - 0.55, "$W_\\Delta$, softplus", fontsize=17)
    arrow(ax, (8.5, TOKEN - 0.15), (8.5, MAIN - 0.6))
    label(ax, 8.85, TOKEN + 0.7, "$\\Delta$")
    label(ax, 9.3, TOKEN + 0.7, "$2d$", BLUE)


def draw_gate(ax):
    """The gate on the way out."""
    arrow(ax, (0.35, MAIN + 0.3), (1.3, GATE), bend=-0.3)
    box(ax, 1.75, GATE, "$W_z$", fontsize=18)
    arrow(ax, (2.2, GATE), (3.35, GATE))
    label(ax, 2.7, GATE - 0.3, "$2d$", BLUE)
    box(ax, 3.95, GATE, "SiLU", fontsize=17)
    arrow(ax, (4.55, GATE), (10.4, MAIN + 0.4), bend=-0.22, color=RED)
    label(ax, 8.7, GATE + 0.3, "the gate", RED)


def draw():
    fig, ax = plotting.canvas(13.4, 4.95)
    draw_main_path(ax)
    return fig, plotting.in_stages(ax, draw_token_s_choice, draw_gate)
