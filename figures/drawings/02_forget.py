"""How much of an old value is left after a write under another key. For chapter 02."""

from cheems_ref import plotting

BLUE, RED, GREEN, _, ORANGE, _ = plotting.COLORS
ALPHA = 0.5


def left(overlap, alpha, beta):
    """What an old unit key returns of its value after one write: α S (I - β k kᵀ) k_old."""
    height = (1 - overlap**2) ** 0.5
    old, new = (overlap, height), (1.0, 0.0)  # unit keys with this inner product
    found = beta * sum(a * b for a, b in zip(old, new, strict=True))
    erased = [a - found * b for a, b in zip(old, new, strict=True)]
    return alpha * sum(a * b for a, b in zip(old, erased, strict=True))


def draw():
    fig, ax = plotting.figure(size=(9, 5))
    overlaps = [i / 100 for i in range(101)]
    for words, color, alpha, beta, place in (
        ("Mamba-2, α = ½: every key alike", GREEN, ALPHA, 0, (0.03, 0.54)),
        ("delta rule, β = 1: only\nkeys like the new one", RED, 1, 1, (0.5, 0.86)),
    ):
        ax.plot(overlaps, [left(c, alpha, beta) for c in overlaps], color=color, lw=3)
        ax.text(*place, words, color=color, fontsize=19)
    ax.set_xlabel("inner product of the old key and the new one", fontsize=18)
    ax.set_ylabel("share of its value that\nthe old key still returns", fontsize=18)
    ax.set(xlim=(0, 1), ylim=(-0.02, 1.08), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
    ax.tick_params(labelsize=18)
    drawn = set(ax.get_children())
    ax.plot(overlaps, [left(c, ALPHA, 1) for c in overlaps], color=ORANGE, lw=3)
    ax.text(0.03, 0.2, "Gated DeltaNet, α = ½, β = 1: both", color=ORANGE, fontsize=19)
    return fig, [[artist for artist in ax.get_children() if artist not in drawn]]
