"""Why a key has to know the past: the answer stands after the token that the query looks for."""

from cheems_ref import plotting
from cheems_ref.plotting import arrow, box

BLUE, RED, ORANGE = (plotting.COLORS[i] for i in (0, 1, 4))
STEP, TOKENS, KEYS = 1.3, 2.6, 0.75  # from a token to the next; the heights of tokens and keys
ASKED, ANSWER, LAST = 2, 3, 6  # the places of the key, of the value after it, and of the question


def middle(t):
    """Where token t stands."""
    return 0.8 + STEP * t


def draw_question(ax):
    """Three pairs, a question, and a key that is made from its own token."""
    for t, name in enumerate("a3c7b1c"):
        box(ax, middle(t), TOKENS, name, color=RED if t == LAST else BLUE, fontsize=24)
    start, end = (middle(LAST), TOKENS + 0.42), (middle(ANSWER) + 0.1, TOKENS + 0.42)
    arrow(ax, start, end, color=RED, bend=0.35)
    ax.text(
        middle(4.5) + 0.1, 4.35, "query: what came after c?", ha="center", fontsize=20, color=RED
    )
    arrow(ax, (middle(ANSWER), TOKENS - 0.42), (middle(ANSWER), KEYS + 0.42), color=BLUE)
    box(ax, middle(ANSWER), KEYS, "its key", color=BLUE, fontsize=20)
    ax.text(
        middle(ANSWER) + 0.85, KEYS, 'from its own token:\n"I am a 7"', va="center", fontsize=20
    )


def draw_past(ax):
    """The same key, if it sees one token more."""
    start, end = (middle(ASKED), TOKENS - 0.42), (middle(ANSWER) - 0.7, KEYS + 0.2)
    arrow(ax, start, end, color=ORANGE)
    words = 'with the past:\n"c was before me"'
    ax.text(middle(ASKED) - 0.35, KEYS + 0.55, words, ha="right", va="center", fontsize=20,
            color=plotting.INK)  # fmt: skip


def draw():
    fig, ax = plotting.canvas(9.4, 4.8)
    draw_question(ax)
    return fig, plotting.in_stages(ax, draw_past)
