"""What the value of a token is made from: one token, all tokens so far, or a table's rows."""

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, GREEN, ORANGE = plotting.COLORS[0], plotting.COLORS[2], plotting.COLORS[4]
KINDS = (  # its name, the tokens that it is made from, the value
    ("one matrix", (4,), "$v_s = W x_s$"),
    ("a state-space layer", (0, 1, 2, 3, 4), r"$v_s = \mathrm{SSD}(x)_s$"),
    ("rows of a table", (4,), r"$v_s = x_s \circ$ rows"),
)
SIDE, STEP, LEFT = 0.62, 0.74, 3.5


def draw_tokens(ax, y, read):
    """Six tokens at a height; those that the value is made from are filled."""
    for t, name in enumerate(("$x_0$", "$x_1$", "$x_2$", "$x_3$", "$x_s$", "$x_5$")):
        x = LEFT + STEP * t
        fill = BLUE if t in read else "white"
        edge = BLUE if t in read else plotting.QUIET
        ax.add_patch(Rectangle((x, y - SIDE / 2), SIDE, SIDE, fc=fill, ec=edge, lw=2))
        color = "white" if t in read else "#777777"
        ax.text(x + SIDE / 2, y, name, ha="center", va="center", fontsize=19, color=color)


def draw_table(ax, y):
    """Four rows of a table between tokens and value, two of them taken."""
    for row in range(4):
        taken = row in (0, 2)
        place = (8.35, y - 0.36 + 0.19 * row)
        shade = ORANGE if taken else "#dddddd"
        ax.add_patch(Rectangle(place, 0.75, 0.17, fc=shade, ec="white"))


def draw():
    fig, ax = plotting.canvas(12.4, 4.6)
    stages = []
    for row, (kind, read, value) in enumerate(KINDS):
        before, y = set(ax.get_children()), 3.8 - 1.5 * row
        ax.text(0.1, y, kind, va="center", fontsize=20)
        draw_tokens(ax, y, read)
        if row == 2:
            draw_table(ax, y)
            plotting.arrow(ax, (9.15, y), (9.7, y), color=GREEN)
        start, end = (LEFT + 4.4 * STEP, y + SIDE / 2), (8.3 if row == 2 else 9.7, y + 0.1)
        bend = -0.4 if row == 2 else -0.17  # from token s, over the next
        plotting.arrow(ax, start, end, color=GREEN, bend=bend)
        plotting.box(ax, 11.0, y, value, color=GREEN, fontsize=20)
        stages.append([artist for artist in ax.get_children() if artist not in before])
    return fig, stages[1:]
