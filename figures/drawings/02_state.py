"""A state is a grid: three tokens write into it, it fades, and a query reads it. For chapter 02."""

from cheems_ref import plotting
from cheems_ref.plotting import arrow, state_grid

BLUE, RED, GREEN, _, ORANGE, _ = plotting.COLORS
CELL, FADE = 0.42, 0.7
SIDE = 4 * CELL
PLACES, STATES, WRITES = (0.7, 3.8, 6.9), 0.55, 3.1  # x of the three tokens, y of the two rows
KEYS = [[1, 0, 0, 0], [0, 0.8, 0.6, 0], [0, 0, 0, 1]]
VALUES = [[1, 0.2, 0, 0.7], [0.1, 1, 0.6, 0], [0.5, 0, 0.9, 0.3]]


def outer(v, k):
    """The grid v kᵀ: a row per entry of v, a column per entry of k."""
    return [[v_i * k_j for k_j in k] for v_i in v]


def write(state, v, k):
    """The state after one token: it fades, and v kᵀ is added."""
    return [
        [FADE * old + new for old, new in zip(*rows, strict=True)]
        for rows in zip(state, outer(v, k), strict=True)
    ]


def draw_token(ax, t, state):
    """What token t writes, above the state that it leaves; the state before it fades."""
    if t:
        draw_fade(ax, t - 1)
    x, key, value = PLACES[t], KEYS[t], VALUES[t]
    ax.text(x + SIDE / 2, WRITES + SIDE + 1.0, f"token {t}", color=BLUE, ha="center", fontsize=19)
    state_grid(ax, x, WRITES + SIDE + 0.12, [key], cell=CELL, color=BLUE, largest=1)
    ax.text(x + SIDE + 0.1, WRITES + SIDE + 0.22, f"$k_{t}$", fontsize=19)
    state_grid(ax, x - CELL - 0.12, WRITES, [[v] for v in value], cell=CELL, color=BLUE, largest=1)
    ax.text(x - CELL / 2 - 0.12, WRITES - 0.42, f"$v_{t}$", ha="center", fontsize=19)
    state_grid(ax, x, WRITES, outer(value, key), cell=CELL, color=ORANGE, largest=1)
    ax.text(x + SIDE + 0.1, WRITES + 0.7, f"$v_{t} k_{t}^\\top$", fontsize=19)
    arrow(ax, (x + SIDE / 2, WRITES - 0.08), (x + SIDE / 2, STATES + SIDE + 0.06), color=ORANGE)
    ax.text(x + SIDE / 2 + 0.14, STATES + SIDE + 0.36, "+", fontsize=22)
    state_grid(ax, x, STATES, state, cell=CELL, largest=1)
    ax.text(x + SIDE / 2, STATES - 0.45, f"$S_{t}$", ha="center", fontsize=19)


def draw_fade(ax, t):
    """The arrow from the state after token t to the next one."""
    start, end = PLACES[t] + SIDE + 0.1, PLACES[t + 1] - 0.1
    arrow(ax, (start, STATES + SIDE / 2), (end, STATES + SIDE / 2), color=GREEN)
    words = f"× {FADE}" if t else f"fades:\n× {FADE}"
    ax.text((start + end) / 2, STATES + SIDE / 2 + 0.15, words, ha="center", fontsize=17)


def draw_reading(ax, state, query):
    """The last state's columns, each times its entry of the query, and their sum."""
    x = PLACES[2] + SIDE + 1.45
    arrow(ax, (PLACES[2] + SIDE + 0.1, STATES + SIDE / 2), (x - 0.1, STATES + SIDE / 2), color=RED)
    ax.text(x - 0.72, STATES + SIDE / 2 + 0.15, "read", ha="center", fontsize=17)
    state_grid(ax, x, STATES + SIDE + 0.12, [query], cell=CELL, color=RED, largest=1)
    ax.text(x + SIDE / 2, STATES + SIDE + 0.75, "$q = k_1$", ha="center", fontsize=19)
    weighted = [[w * q for w, q in zip(row, query, strict=True)] for row in state]
    state_grid(ax, x, STATES, weighted, cell=CELL, largest=1)
    ax.text(x + SIDE + 0.33, STATES + SIDE / 2, "=", ha="center", va="center", fontsize=22)
    answer = [[sum(row)] for row in weighted]
    state_grid(ax, x + SIDE + 0.65, STATES, answer, cell=CELL, color=RED, largest=1)
    ax.text(x + SIDE + 0.86, STATES - 0.45, f"${FADE}\\,v_1$", ha="center", fontsize=19)
    words = "the key says where,\nthe value says what"
    ax.text(x - 0.2, WRITES + SIDE, words, va="center", fontsize=18, color=plotting.INK)
    assert all(abs(a[0] - FADE * v) < 1e-12 for a, v in zip(answer, VALUES[1], strict=True))


def draw():
    fig, ax = plotting.canvas(13.0, 6.05)
    first = write([[0.0] * 4] * 4, VALUES[0], KEYS[0])
    second = write(first, VALUES[1], KEYS[1])
    third = write(second, VALUES[2], KEYS[2])
    draw_token(ax, 0, first)
    return fig, plotting.in_stages(
        ax,
        lambda ax: draw_token(ax, 1, second),
        lambda ax: draw_token(ax, 2, third),
        lambda ax: draw_reading(ax, third, KEYS[1]),
    )
