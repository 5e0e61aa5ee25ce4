"""What is associative can be cut: states with their decays and a softmax's triples in one tree."""

from cheems_ref import plotting

BLUE, RED, GREEN, _, ORANGE, _ = plotting.COLORS
PLACES = (0.9, 2.5, 4.1, 5.7)  # x of the four slices, from a tree's left edge
HEIGHTS = (1.1, 2.9, 4.7)  # y of slices, of halves, and of the whole


def draw_pair(ax, x, y, shades):
    """A decay and a state."""
    ax.text(x - 0.42, y, "$a$", ha="center", va="center", fontsize=17)
    ax.text(x + 0.66, y, "$W$", ha="center", va="center", fontsize=15, color=GREEN)
    plotting.state_grid(ax, x - 0.25, y - 0.36, shades, cell=0.24, largest=1)


def draw_triple(ax, x, y, shades):
    """A largest score, a sum and a weighted sum, which is a vector."""
    ax.text(x - 0.42, y, "$m\\;z$", ha="center", va="center", fontsize=17, color=RED)
    ax.text(x + 0.52, y, "$u$", ha="center", va="center", fontsize=17, color=RED)
    plotting.state_grid(
        ax, x + 0.1, y - 0.36, [[row[0]] for row in shades], cell=0.24, color=RED, largest=1
    )


def mean(one, other):
    """Two grids, entry by entry."""
    return [
        [(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)
    ]


def draw_tree(ax, left, title, draw_item, note, rule):
    """Four slices, two halves, the whole, which it returns; the rule by which two are joined."""
    shades = [
        [[(5 * i + 3 * j + 7 * k) % 9 / 9 for j in range(3)] for i in range(3)] for k in range(4)
    ]
    for one, other in ((0, 1), (2, 3), (4, 5)):  # what two slices leave together
        shades.append(mean(shades[one], shades[other]))
    halves = [sum(PLACES[i : i + 2]) / 2 for i in (0, 2)]
    levels = ([*PLACES], halves, [sum(halves) / 2])
    k = 0
    for above, (places, y) in enumerate(zip(levels, HEIGHTS, strict=True)):
        drawn = set(ax.get_children())  # in the end: of all but the whole
        for i, x in enumerate(places):
            for source in levels[above - 1][2 * i : 2 * i + 2] if above else ():
                start, end = (left + source, HEIGHTS[above - 1] + 0.5), (left + x, y - 0.5)
                plotting.arrow(ax, start, end)
            draw_item(ax, left + x, y, shades[k])
            k += 1
    whole = [artist for artist in ax.get_children() if artist not in drawn]
    for i, x in enumerate(PLACES):
        ax.text(left + x, 0.35, f"slice {i}", ha="center", color=BLUE, fontsize=15)
    ax.text(left + 3.3, 5.75, title, ha="center", fontsize=18)
    whole.append(ax.text(left + 4.5, 4.55, note, fontsize=15, color=plotting.INK))
    ax.text(left, 4.3, rule, fontsize=15, color=plotting.INK, linespacing=1.5)
    return whole


def draw():
    fig, ax = plotting.canvas(14.0, 6.2)
    rule = "$a = a_1 a_2$\n$W = a_2 W_1 + W_2$"
    state = draw_tree(ax, 0.1, "a state: $(a, W)$", draw_pair, "serves every\nlater query", rule)
    rule = "$m = \\max(m_1, m_2)$\n$u = e^{m_1 - m} u_1$\n  $+ e^{m_2 - m} u_2$, $z$ too"
    triple = draw_tree(
        ax, 7.3, "a softmax: $(m, z, u)$", draw_triple, "belongs to\none query", rule
    )
    return fig, [[*state, *triple]]
