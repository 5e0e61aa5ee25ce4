"""What is associative can be cut: a softmax's triples, and states with decays, in the same tree."""

from cheems_ref import plotting

BLUE, RED, GREEN, *_ = plotting.COLORS
PLACES = (1.15, 3.95, 6.75, 9.55)  # x of the four slices
HEIGHTS = (1.15, 3.2, 5.25)  # y of slices, of halves, and of the whole
CELL = 0.28


def mean(one, other):
    """Two grids, entry by entry."""
    return [
        [(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)
    ]


def nodes():
    """Where each node of the tree stands, and the grid that it shows."""
    shades = [
        [[(5 * i + 3 * j + 7 * k) % 9 / 9 for j in range(3)] for i in range(3)] for k in range(4)
    ]
    for one, other in ((0, 1), (2, 3), (4, 5)):  # what two slices leave together
        shades.append(mean(shades[one], shades[other]))
    halves = [sum(PLACES[i : i + 2]) / 2 for i in (0, 2)]
    levels = zip(([*PLACES], halves, [sum(halves) / 2]), HEIGHTS, strict=True)
    places = [(x, y) for across, y in levels for x in across]
    return [*zip(places, shades, strict=True)]


def draw_tree(ax):
    """The arrows from two slices to what they leave, and the slices' names."""
    placed = [place for place, _ in nodes()]
    for child, parent in ((0, 4), (1, 4), (2, 5), (3, 5), (4, 6), (5, 6)):
        (x, y), (above, top) = placed[child], placed[parent]
        plotting.arrow(ax, (x, y + 0.55), (above, top - 0.55))
    for i, x in enumerate(PLACES):
        ax.text(x, 0.2, f"slice {i}", ha="center", color=BLUE, fontsize=20)


def draw_triples(ax):
    """A largest score, a sum and a weighted sum, which is a vector."""
    for (x, y), shades in nodes():
        column = [[row[0]] for row in shades]
        how = dict(cell=CELL, color=RED, largest=1)
        for left, number in ((x - 1.02, column[1]), (x - 0.69, column[2])):
            plotting.state_grid(ax, left, y - CELL / 2, [number], **how)
        plotting.state_grid(ax, x - 0.36, y - 1.5 * CELL, column, **how)
    x, y = nodes()[-1][0]
    for left, name in ((x - 0.88, "$m$"), (x - 0.55, "$z$"), (x - 0.22, "$u$")):
        ax.text(left, y + 0.58, name, ha="center", fontsize=22, color=RED)
    ax.text(
        x - 1.3, y, "a softmax,\nfor one query", ha="right", va="center", fontsize=21, color=RED
    )


def draw_states(ax):
    """A decay and a state."""
    for (x, y), shades in nodes():
        plotting.state_grid(ax, x + 0.16, y - CELL / 2, [shades[1][1:2]], cell=CELL, largest=1)
        plotting.state_grid(ax, x + 0.49, y - 1.5 * CELL, shades, cell=CELL, largest=1)
    x, y = nodes()[-1][0]
    for left, name in ((x + 0.3, "$a$"), (x + 0.92, "$W$")):
        ax.text(left, y + 0.58, name, ha="center", fontsize=22, color=GREEN)
    words = "a state, for\nevery later query"
    ax.text(x + 1.6, y, words, va="center", fontsize=21, color=GREEN)


def draw():
    fig, ax = plotting.canvas(11.0, 6.4)
    draw_tree(ax)
    draw_triples(ax)
    return fig, plotting.in_stages(ax, draw_states)
