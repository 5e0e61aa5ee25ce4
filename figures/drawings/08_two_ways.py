"""Two ways to recall: the opening drawing of chapter 08."""

from cheems_ref import plotting


def draw_row(ax, y):
    """A row of three pairs and a query; returns the place of each token."""
    tokens = ["ann", "3", "bob", "8", "cat", "5", "…", "bob", "?"]
    xs = [3.4 + 1.02 * i for i in range(9)]
    for x, token in zip(xs, tokens, strict=True):
        color = plotting.INK if token in ("bob", "8", "?") else plotting.QUIET
        if token == "…":
            ax.text(x, y, token, ha="center", va="center", fontsize=18)
        else:
            plotting.box(ax, x, y, token, color=color, fontsize=16)
    return xs


def draw_previous(ax, x, y, color):
    """Attention's first look back, above the row: to the token before."""
    plotting.arrow(ax, (x[3], y), (x[2] + 0.05, y), color=color, bend=0.7)
    ax.text(x[2] + 0.3, y + 0.45, "1  previous token", ha="center", color=color, fontsize=17)
    ax.text(0.1, y + 0.6, "Attention:\nlook back", color=color, fontsize=18, va="center")


def draw_match(ax, x, y, color):
    """Its second: to what came after bob."""
    plotting.arrow(ax, (x[7], y), (x[3] + 0.1, y), color=color, bend=0.4)
    name = "2  match: what came after bob?"
    ax.text(x[5] + 0.1, y + 0.9, name, ha="center", color=color, fontsize=17)


def draw_state(ax, x, y, color):
    """A small memory below the row: three writes and one read."""
    for i, entry in enumerate(("ann → 3", "bob → 8", "cat → 5")):
        place = x[2] + 1.3 * i - 0.85
        plotting.arrow(ax, (x[2 * i + 1] - 0.51, y + 1.6), (place, y + 0.35), color=color)
        frame = dict(boxstyle="square,pad=0.45", fc="#d9f0e8" if i == 1 else "white", ec=color)
        ax.text(place, y, entry, ha="center", va="center", fontsize=15, bbox=frame | dict(lw=2))
    plotting.arrow(ax, (x[2] + 0.8, y - 0.3), (x[7], y + 1.5), color=color, bend=0.35)
    ax.text(x[6] + 0.75, y + 0.25, "read with bob", color=color, fontsize=17)
    name = "write each value under its key"
    ax.text(x[2] + 0.45, y - 0.75, name, ha="center", color=color, fontsize=17)
    ax.text(0.1, y, "A state:\nremember", color=color, fontsize=18, va="center")


def draw():
    fig, ax = plotting.canvas(12.8, 4.7)
    x = draw_row(ax, 2.9)
    return fig, plotting.in_stages(
        ax,
        lambda ax: draw_previous(ax, x, 3.3, plotting.COLORS[0]),
        lambda ax: draw_match(ax, x, 3.3, plotting.COLORS[0]),
        lambda ax: draw_state(ax, x, 1.0, plotting.COLORS[2]),
    )
