"""Holm's rule as a staircase: p-values have to stay below it, from the first step on."""

from cheems_ref import plotting

GREEN, RED = plotting.COLORS[2], plotting.COLORS[1]
STEPS = [0.05 / 3, 0.05 / 2, 0.05]
WORDS = "0.05/3", "0.05/2", "0.05"


def draw_stairs(ax, title):
    """The thresholds, from the smallest p-value's to the largest's."""
    for i, (step, words) in enumerate(zip(STEPS, WORDS, strict=True)):
        ax.plot([i - 0.5, i + 0.5], [step] * 2, color=plotting.INK, lw=3)
        if i:
            ax.plot([i - 0.5] * 2, [STEPS[i - 1], step], color=plotting.INK, lw=3)
        ax.text(i - 0.47, step + 0.001, words, fontsize=16, va="bottom")
    ax.set(xlim=(-0.5, 2.5), ylim=(0, 0.058), xlabel="p-values, from the smallest up")
    ax.set_xticks(range(3), ["first", "second", "third"], fontsize=16)
    ax.set_title(title, fontsize=18)


def draw_value(ax, i, p, words, color, above=False, **how):
    """A p-value, and what becomes of it."""
    (dot,) = ax.plot(i, p, "o", ms=14, color=color, mew=2.5, **how)
    place, side = (p + 0.0025, "bottom") if above else (p - 0.0035, "top")
    text = f"{p:g} {words}"
    return [dot, ax.text(i, place, text, ha="center", va=side, fontsize=16, color=color)]


def draw():
    fig, (left, right) = plotting.figure(1, 2, size=(13.0, 4.6))
    draw_stairs(left, "below every step")
    draw_stairs(right, "above the first")
    left.set_ylabel("p")
    for i, p in enumerate((0.01, 0.02, 0.04)):
        draw_value(left, i, p, "passes", GREEN)
    stop = draw_value(right, 0, 0.02, "fails", RED, above=True)
    rest = []
    for i, p in ((1, 0.02), (2, 0.04)):
        rest += draw_value(right, i, p, "not tested", plotting.QUIET, mfc="white")
    return fig, [stop, rest]
