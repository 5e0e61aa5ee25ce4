"""The query–key pairs of causal attention, shared out to two ranks in two ways."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

TOKENS, SIDE = 16, 0.27
WAYS = {"halves": [0] * 8 + [1] * 8, "zig-zag": [0] * 4 + [1] * 8 + [0] * 4}  # whose a query is


def draw_way(ax, x, name, owners):
    """A square for every pair of a query (down) and a key (across), by the query's rank."""
    colors = plotting.COLORS[0], plotting.COLORS[1]
    for query, owner in enumerate(owners):
        for key in range(query + 1):
            place = (x + SIDE * key, 4.4 - SIDE * query)
            ax.add_patch(Rectangle(place, SIDE, SIDE, fc=colors[owner], ec="white", lw=0.8))
    counts = [sum(query + 1 for query, o in enumerate(owners) if o == rank) for rank in (0, 1)]
    ax.text(x + 1.2, 4.95, name, fontsize=20)
    for rank in (0, 1):
        y = 4.3 - 0.5 * rank
        ax.text(x + 2.5, y, f"rank {rank}: {counts[rank]} pairs", fontsize=18, color=colors[rank])


def draw():
    fig, ax = plotting.canvas(12.4, 5.5)
    for i, (name, owners) in enumerate(WAYS.items()):
        draw_way(ax, 0.5 + 6.2 * i, name, owners)
    return fig, []
