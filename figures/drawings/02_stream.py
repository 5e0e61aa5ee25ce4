"""Which key each of 60 tokens writes: 24 keys, twelve again, 24 more. For chapter 02."""

from cheems_ref import plotting

BLUE, RED = plotting.COLORS[:2]
SPANS = [
    (range(24), range(24), BLUE, "24 keys", (1, 27)),
    (range(24, 36), range(12), RED, "the first 12 again,\nwith new values", (37, 1)),
    (range(36, 60), range(24, 48), BLUE, "24 more keys", (44, 25)),
]


def draw():
    fig, ax = plotting.figure(size=(11, 5))
    for tokens, keys, color, words, place in SPANS:
        ax.plot(tokens, keys, "s", color=color, markersize=7)
        ax.text(*place, words, color=color, fontsize=20)
    for border in (23.5, 35.5):
        ax.axvline(border, color=plotting.QUIET, lw=1)
    ax.set_xlabel("token", fontsize=18)
    ax.set_ylabel("the key it writes", fontsize=18)
    ax.set(xticks=[0, 24, 36, 59], yticks=[0, 12, 24, 47], xlim=(-1, 60), ylim=(-2, 50))
    ax.tick_params(labelsize=18)
    return fig, []
