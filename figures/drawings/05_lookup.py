"""Attention over SSD: a token writes into a state, and a later one looks up what was read there."""

import torch

from cheems_ref import plotting
from cheems_ref.plotting import arrow, box, state_grid

BLUE, RED, GREEN, ORANGE = (plotting.COLORS[i] for i in (0, 1, 2, 4))
CELL, STEP, FADE = 0.23, 1.4, 0.8
TOKENS, STATES, VALUES, OUTPUT = 4.55, 2.75, 1.75, 0.45  # heights
S, M, T = 1, 3, 5  # the token that writes, the moment looked up, the token that reads


def middle(t):
    """Where token t and its state stand."""
    return 0.6 + STEP * t


def states():
    """The six states (3, 4) of a recurrence that fades; token S writes more than the others."""
    drawn = dict(generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    keys, values = torch.rand(6, 4, **drawn), torch.rand(6, 3, **drawn)
    amounts = torch.full((6,), 0.12, dtype=torch.float64)
    amounts[S] = 1.0
    state, found = torch.zeros(3, 4, dtype=torch.float64), []
    for t in range(6):
        state = FADE * state + amounts[t] * torch.outer(values[t], keys[t])
        found.append(state.tolist())
    return found


def draw_recurrence(ax):
    """Tokens above their states; each state is the one before, faded, and what a token writes."""
    for t, state in enumerate(states()):
        name = {S: "$x_s$", M: "$x_m$", T: "$x_t$"}.get(t, f"$x_{t}$")
        box(ax, middle(t), TOKENS, name, color=BLUE, fontsize=19)
        state_grid(ax, middle(t) - 2 * CELL, STATES, state, cell=CELL, largest=0.8)
        if t < 5:
            ends = middle(t) + 2 * CELL + 0.08, middle(t + 1) - 2 * CELL - 0.08
            arrow(ax, *((x, STATES + 1.5 * CELL) for x in ends), color=GREEN)
    start = middle(S), TOKENS - 0.38
    arrow(ax, start, (middle(S), STATES + 3 * CELL + 0.05), color=ORANGE)
    ax.text(middle(S) + 0.15, 3.87, "token s\nwrites", va="center", fontsize=19)


def draw_value(ax):
    """What token m reads from its state is its value."""
    ax.text(middle(M), STATES + 3 * CELL + 0.12, "$h_m$ still holds it", ha="center", fontsize=19)
    arrow(ax, (middle(M), STATES - 0.05), (middle(M), VALUES + 0.33), color=GREEN)
    box(ax, middle(M), VALUES, "SSD$(x)_m$", color=GREEN, fontsize=18)
    ax.text(middle(M) - 0.95, VALUES, "token m reads it:\nits value", ha="right", va="center",
            fontsize=19)  # fmt: skip


def draw_lookup(ax):
    """Token t looks up the value of moment m."""
    box(ax, middle(T), OUTPUT, "$y_t$", color=RED, fontsize=19)
    start = middle(M) + 0.8, VALUES - 0.1
    arrow(ax, start, (middle(T) - 0.4, OUTPUT + 0.1), color=RED, bend=0.15)
    ax.text(middle(M) + 0.95, OUTPUT + 0.05, "$w_{tm}$: the query of\nt picks moment m", ha="right",
            va="center", fontsize=19)  # fmt: skip


def draw():
    fig, ax = plotting.canvas(8.2, 5.0)
    draw_recurrence(ax)
    return fig, plotting.in_stages(ax, draw_value, draw_lookup)
