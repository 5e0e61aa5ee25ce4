"""Clock faces at two positions: the opening drawing of chapter 04."""

import math

import torch

from cheems_ref import plotting

SPEEDS = [1, 0.32, 0.1, 0.032, 0.01]


def draw_clocks(axes, speeds, position, since):
    """A row of clock faces, 0 at 3 o'clock; arcs lead from the hands' places at token since."""
    for ax, speed in zip(axes, speeds, strict=True):
        ring = torch.linspace(0, 2 * math.pi, 100, dtype=torch.float64)
        ax.plot(ring.cos(), ring.sin(), color=plotting.QUIET, lw=1.5)
        ax.plot([0.9, 1.1], [0, 0], color=plotting.INK, lw=2)
        ax.text(1.2, 0, "0", va="center", fontsize=14)
        arc = speed * torch.linspace(since, position, 100, dtype=torch.float64)
        ax.plot(0.6 * arc.cos(), 0.6 * arc.sin(), color=plotting.COLORS[1], lw=3)
        ax.plot([0, arc[0].cos()], [0, arc[0].sin()], color=plotting.COLORS[0], lw=4, alpha=0.25)
        ax.plot([0, arc[-1].cos()], [0, arc[-1].sin()], color=plotting.COLORS[0], lw=4)
        ax.set(xlim=(-1.15, 1.4), ylim=(-1.15, 1.15), aspect="equal")
        ax.axis("off")


def draw():
    fig, axes = plotting.figure(2, 5, size=(12, 4.4))
    fig.get_layout_engine().set(w_pad=0.2)  # room for words that grow on slides
    words = dict(va="center", fontsize=17)
    for row, position in zip(axes, (7, 12), strict=True):
        draw_clocks(row, SPEEDS, position, since=7)
        row[0].text(-1.5, 0, f"token {position}", ha="right", **words)
    axes[0][0].text(-1.5, 1.45, "rad / token", ha="right", **words)
    red = dict(color=plotting.COLORS[1]) | words
    axes[1][0].text(-1.5, -1.5, "in 5 tokens", ha="right", **red)
    for above, below, speed in zip(*axes, SPEEDS, strict=True):
        above.text(0, 1.45, f"{speed:g}", ha="center", **words)
        below.text(0, -1.5, f"5 × {speed:g}", ha="center", **red)
    return fig, []
