"""The four matrices of attention, to scale, when heads share keys and values."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

SIDE, GAP = 1.12, 0.16  # of a d × d matrix, and between matrices
HEADS = 8
COLOR = dict(q=plotting.COLORS[1], k=plotting.COLORS[0], v=plotting.COLORS[0], out="#aaaaaa")


def draw_layer(ax, left, key_heads):
    """The matrices of a layer with so many key heads; returns where they end."""
    x, share = left, key_heads / HEADS
    for name in ("q", "k", "v", "out"):
        wide = SIDE * (share if name in "kv" else 1)
        ax.add_patch(Rectangle((x, 0.7), wide, SIDE, fc=COLOR[name], alpha=0.75, ec="white"))
        ax.text(x + wide / 2, 0.4, name, ha="center", va="center", fontsize=19)
        x += wide + GAP
    heads = "1 key head" if key_heads == 1 else f"{key_heads} key heads"
    ax.text(left, 2.2, f"{heads}: ${2 + 2 * share:g}\\,d^2$", va="center", fontsize=19)
    return x - GAP


def draw():
    fig, ax = plotting.canvas(13.0, 2.6)
    left, stages = 0.1, []
    for key_heads in (8, 2, 1):
        before = set(ax.get_children())
        left = draw_layer(ax, left, key_heads) + 0.7
        stages.append([artist for artist in ax.get_children() if artist not in before])
    return fig, stages[1:]
