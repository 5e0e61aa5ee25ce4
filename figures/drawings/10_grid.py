"""The grid of `_write`'s programs for one text, and one of them: its place, piece and rows."""

from pathlib import Path

from matplotlib.patches import Rectangle

from cheems_ref import plotting

BLUE, _, GREEN, _, ORANGE, _ = plotting.COLORS
SOURCE = Path(plotting.__file__).with_name("triton_ssd.py")
LINE = "chunk, part = "  # how the line begins that finds a program's chunk and tile
CHUNKS, TILES, HEADS, GROUPS = 3, 2, 4, 2
MINE = 5, 2  # of a program: its places on the first two axes
LEFT, TOP, WIDE, HIGH = 1.9, 4.1, 0.85, 0.7
STATE, NUMBERS, CHANNELS, TILE = 8.3, 24, 40, 32  # x of the state; its rows, columns, and a tile's
TOKENS = 16  # of a chunk


def draw_grid(ax):
    """A square for every program, with the numbers of its places on the axes."""
    for head in range(HEADS):
        for point in range(CHUNKS * TILES):
            place = LEFT + WIDE * point, TOP - HIGH * (head + 1)
            ax.add_patch(Rectangle(place, WIDE, HIGH, fc="white", ec=plotting.QUIET, lw=1.2))
        middle = TOP - HIGH * (head + 0.5)
        ax.text(LEFT - 0.15, middle, f"head {head}", ha="right", va="center", fontsize=17)
    for point in range(CHUNKS * TILES):
        middle = LEFT + WIDE * (point + 0.5)
        ax.text(middle, TOP + 0.15, point, ha="center", fontsize=17)
    middle = LEFT + WIDE * CHUNKS * TILES / 2
    ax.text(middle, TOP + 0.65, "program_id(0): chunk and tile", ha="center", fontsize=17)
    ax.text(LEFT - 0.15, TOP + 0.15, "program_id(1)", ha="right", fontsize=17)
    for chunk in range(CHUNKS):
        start, end = (LEFT + WIDE * TILES * each for each in (chunk, chunk + 1))
        low = TOP - HIGH * HEADS - 0.12
        ax.plot([start + 0.1, end - 0.1], [low, low], color=BLUE, lw=4)
        words = dict(ha="center", va="top", fontsize=17, color=BLUE)
        ax.text((start + end) / 2, low - 0.12, f"chunk {chunk}", **words)


def draw_line(ax):
    """The line of `_program` that finds the chunk and the tile."""
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    line = next(line.strip() for line in lines if line.strip().startswith(LINE))
    ax.text(0.1, 5.35, line, family="monospace", fontsize=18)


def draw_mine(ax):
    """One program, and how it finds its chunk and its tile."""
    point, head = MINE
    place = LEFT + WIDE * point, TOP - HIGH * (head + 1)
    box = ax.add_patch(Rectangle(place, WIDE, HIGH, fc=BLUE, ec=BLUE))
    words = f"{point} // {TILES} = {point // TILES}: chunk {point // TILES}\n"
    words += f"{point} % {TILES} = {point % TILES}: tile {point % TILES}"
    return [box, ax.text(LEFT, -0.04, words, color=BLUE, fontsize=18)]


def draw_state(ax):
    """The state that the program's chunk leaves in its head, and the columns that it makes."""
    cell, low = 0.075, 1.65
    start, wide = STATE + cell * TILE, cell * (CHANNELS - TILE)
    size = cell * CHANNELS, cell * NUMBERS
    point, head = MINE
    frame = ax.add_patch(Rectangle((STATE, low), *size, fc="white", ec=GREEN, lw=2.5))
    mine = ax.add_patch(Rectangle((start, low), wide, size[1], fc=ORANGE, ec=GREEN, lw=1.5))
    words = f"p = {CHANNELS} channels in tiles of {TILE};\n"
    words += f"what chunk {point // TILES} leaves in head {head}:\n{NUMBERS} × {CHANNELS} numbers"
    title = ax.text(STATE - 0.3, low + size[1] + 0.25, words, fontsize=17, color=GREEN)
    says = f"tile {point % TILES}:\nchannels\n{TILE} to {CHANNELS - 1}"
    middle = low + size[1] / 2
    note = ax.text(start + wide + 0.15, middle, says, fontsize=17, color=ORANGE, va="center")
    box = LEFT + WIDE * (point + 1), TOP - HIGH * (head + 0.5)
    before = {*ax.texts}
    plotting.arrow(ax, box, (start, low + 0.7), color=ORANGE)
    return [frame, mine, title, note, *({*ax.texts} - before)]


def draw_rows(ax):
    """Where the program's first token has its rows, and its chunk its state."""
    point, head = MINE
    chunk, group = point // TILES, head // (HEADS // GROUPS)
    token = chunk * TOKENS
    mine, shared, state = token * HEADS + head, token * GROUPS + group, head * CHUNKS + chunk
    drawn = [ax.text(5.0, 0.38, f"its first token, {token}, in head {head}:", fontsize=18)]
    lines = (
        (
            f"mine   = {token} · {HEADS} + {head} = {mine}",
            f"row of $x$, $\\Delta$, $y$; {HEADS} heads",
        ),
        (f"shared = {token} · {GROUPS} + {group} = {shared}", f"row of $B$, $C$; {GROUPS} groups"),
        (f"place  = {head} · {CHUNKS} + {chunk} = {state}", f"state; {CHUNKS} chunks a head"),
    )
    for y, color, (line, of) in zip((-0.04, -0.44, -0.84), (BLUE, BLUE, GREEN), lines, strict=True):
        drawn.append(ax.text(5.0, y, line, family="monospace", fontsize=18, color=color))
        drawn.append(ax.text(9.2, y, of, fontsize=18, color=color))
    return drawn


def draw():
    fig, ax = plotting.canvas(12.4, 6.8)
    ax.set_ylim(-1.0, 5.8)
    draw_line(ax)
    draw_grid(ax)
    return fig, [draw_mine(ax), draw_state(ax), draw_rows(ax)]
