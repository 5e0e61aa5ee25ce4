"""Where Longhorn's step ends: staying close and answering well, and their sum. For chapter 02."""

from cheems_ref import plotting

BLUE, RED, GREEN = plotting.COLORS[:3]
BETA = 2.0  # for a unit key


def close(x):
    """What it costs to go a share x of the way from the old answer to the value."""
    return x**2


def well(x):
    """What it costs that the share 1 - x of the error is left."""
    return BETA * (1 - x) ** 2


def draw():
    fig, ax = plotting.figure(size=(9, 6))
    places = [i / 100 for i in range(101)]
    best = min(places, key=lambda x: close(x) + well(x))
    assert abs(best - BETA / (1 + BETA)) < 0.01
    for words, color, curve, place in (
        ("stay close to the old state", BLUE, close, (0.02, 0.27)),
        ("answer the new key well", RED, well, (0.33, 1.2)),
        ("their sum", GREEN, lambda x: close(x) + well(x), (0.17, 1.7)),
    ):
        ax.plot(places, [curve(x) for x in places], color=color, lw=3)
        ax.text(*place, words, color=color, fontsize=19)
    lowest = BETA / (1 + BETA)
    bottom = close(lowest) + well(lowest)
    ax.plot([lowest, lowest], [0, bottom], color=GREEN, lw=1.5, ls="--")
    ax.plot(lowest, bottom, "o", color=GREEN, markersize=13)
    ax.annotate("", (1, 0.85), (lowest, 0.85), arrowprops=dict(arrowstyle="<->", lw=2))
    ax.text((1 + lowest) / 2, 0.9, "error left: $e$", ha="center", fontsize=19)
    ax.set_xticks([0, lowest, 1], ["old answer", "Longhorn", "value"], fontsize=19)
    ax.set_yticks([])
    ax.set_ylabel("loss", fontsize=18)
    ax.set(xlim=(-0.06, 1.06), ylim=(0, 2.1))
    return fig, []
