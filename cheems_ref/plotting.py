"""One quiet figure style for all notebooks: large type, few lines, colours that everyone can tell.

`figure` makes axes. `lines` draws curves, with `level` and `band` beside them. `heatmap` draws a
matrix, and `heatmaps` several with one scale. `canvas`, `box`, `arrow` and `state_grid` are for
drawings. `save` shows the figure in the notebook and, while the book is built, writes it to
figures/. Line plots become SVG, which nbval compares; figures with an image become PNG. The bytes
are the same on every run. A notebook also stores a small PNG of each SVG, because JupyterLab and VS
Code draw no SVG in a notebook they don't trust. On slides, a figure grows in the stages given to
`save(..., stages=...)`. `show_drawing` is for drawings, which aren't made of data: their code is in
figures/drawings/.

The colours are from Okabe and Ito (2008), in an order that also differs in lightness.
"""

import base64
import hashlib
import html
import io
import os
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import PIL.Image
import PIL.PngImagePlugin
from IPython.display import SVG, Image, display
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

INK, QUIET = "#222222", "#8a8a8a"
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
ON_COLOR = "#111111"  # for words on any of these but blue; stays dark on the dark page, too
DASHES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2))]

STYLE = Path(__file__).with_name("figures.mplstyle")

# The PNG beside an SVG: three pixels where the SVG has two, and few colours, so that it's small.
BESIDE_DPI, BESIDE_COLORS = 144, 64

# Environment variable with the folder that `save` writes to. Only the build sets it, so a reader's
# run changes no file.
FIGURES = "CHEEMS_FIGURES"


def figure(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] | None = None
) -> tuple[Figure, Any]:
    """Make a figure in the project's style.

    Args:
        rows, columns: number of axes.
        size: width and height in inches; None for 5 × 3.6 per axes, at most 12 wide.

    Returns:
        The figure, and its axes as `Figure.subplots` returns them: one, or an array of them.
    """
    matplotlib.style.use(STYLE)  # for good: titles and legends read it when they are made
    fig = Figure(figsize=size or (min(5.0 * columns, 12.0), 3.6 * rows), layout="constrained")
    return fig, fig.subplots(rows, columns)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a drawing of so many inches: axes without ticks or frame, one unit an inch, y upward."""
    fig, ax = figure(size=(width, height))
    ax.set(xlim=(0, width), ylim=(0, height), frame_on=False, xticks=[], yticks=[])
    return fig, ax


def box(ax: Axes, x: float, y: float, text: str, *, color: str = QUIET, **font: object) -> None:
    """Write text into a rounded box of that colour, centred at (x, y); `fontsize=15` or `font`."""
    frame = dict(boxstyle="round,pad=0.5", fc="white", ec=color, lw=2)
    ax.text(x, y, text, ha="center", va="center", bbox=frame, **dict(fontsize=15) | font)


def arrow(ax: Axes, start: tuple, end: tuple, *, color: str = QUIET, bend: float = 0.0) -> None:
    """Draw an arrow from (x, y) to (x, y); `bend` makes it a curve (0.3 is a quiet one)."""
    style = dict(arrowstyle="-|>", color=color, lw=2, mutation_scale=18)
    ax.annotate("", end, start, arrowprops=style | dict(connectionstyle=f"arc3,rad={bend}"))


def in_stages(ax: Axes, *parts: Callable[[Axes], None]) -> list[list[Artist]]:
    """Draw one part after the other; what each has drawn is a stage for `save`."""
    stages: list[list[Artist]] = []
    for draw in parts:
        before = {*ax.get_children()}
        draw(ax)
        drawn = *ax.texts, *ax.patches, *ax.lines, *ax.collections
        stages.append([artist for artist in drawn if artist not in before])
    return stages


def state_grid(
    ax: Axes,
    x: float,
    y: float,
    values: Sequence[Sequence[float]],
    *,
    cell: float = 0.4,
    color: str = COLORS[2],
    largest: float | None = None,
) -> None:
    """Draw a state as what it is, a grid of numbers; (x, y) is its lower left corner.

    A row of `values` is one entry of the value (p of them, downward), a column one of the key (n of
    them). The larger |value| is, the fuller a cell's colour; `largest` has the full one, by default
    the largest of this grid. Green is a state, COLORS[4] (orange) what a token writes into it.
    """
    largest = largest or max(abs(value) for row in values for value in row) or 1.0
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            place = (x + j * cell, y + (len(values) - 1 - i) * cell)
            shade = to_rgba(color, min(1.0, abs(value) / largest))
            ax.add_patch(Rectangle(place, cell, cell, facecolor=shade, edgecolor=QUIET, lw=0.8))


def lines(
    ax: Axes,
    x: Tensor | Sequence,
    curves: Mapping[str, Tensor | Sequence],
    *,
    xticks: Mapping[float | int, str] | None = None,
    marker: str = "",
    legend: str | None = "best",
    **axes: object,
) -> None:
    """Draw curves over the same places, each with a different colour and dash.

    A second call on the same axes continues with the next colour, and keeps the title, labels and
    scales that it does not set.

    Args:
        ax: where to draw.
        x: the places, as many as each curve has values.
        curves: name: values; a name that begins with "_" stays out of the legend.
        xticks: place: label; None for matplotlib's own.
        marker: of matplotlib, such as "o".
        legend: location, as in matplotlib; "right" for beside the axes, None for no legend.
        axes: title, xlabel, yscale="log" and so on, as `Axes.set` takes them.

    Raises:
        ValueError: a curve does not have one value per place.
    """
    group = f"curves-{ax.figure.axes.index(ax)}"  # in the SVG, where names are unique
    drawn = sum((line.get_gid() or "").startswith(group) for line in ax.lines)
    for i, (name, values) in enumerate(curves.items(), start=drawn):
        if len(values) != len(x):
            raise ValueError(f"curve {name!r} has {len(values)} values for {len(x)} places")
        told = dict(linestyle=DASHES[i % len(DASHES)], color=COLORS[i % len(COLORS)])
        ax.plot(x, values, gid=f"{group}-{i}", marker=marker, label=name, **told)
    ax.set(**axes)
    if xticks:
        ax.set_xticks(list(xticks), list(xticks.values()))
        ax.minorticks_off()
    if legend == "right":
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    elif legend and ax.get_legend_handles_labels()[1]:
        ax.legend(loc=legend)


def level(ax: Axes, y: float, name: str = "", *, side: str = "right") -> None:
    """Draw a quiet horizontal line at y, with its name above it at the "left" or "right" end."""
    ax.axhline(y, color=QUIET, linewidth=1)
    end = side == "right"
    ax.annotate(
        name, (end, y), (0, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
        ha=side, va="bottom", color=INK, fontsize=12,
    )  # fmt: skip


def band(ax: Axes, x: Tensor | Sequence, low: Tensor | Sequence, high: Tensor | Sequence) -> None:
    """Shade the range from `low` to `high` in the colour of the curve drawn last."""
    ax.fill_between(x, low, high, color=ax.lines[-1].get_color(), alpha=0.18, lw=0)


def heatmap(
    ax: Axes,
    matrix: Tensor | np.ndarray,
    *,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    xticks: Sequence | None = None,
    yticks: Sequence | None = None,
    signed: bool = True,
    limit: float | None = None,
    colorbar: bool = True,
    unit: str = "",
) -> None:
    """Draw a matrix as a picture, row 0 on top; entries that are NaN stay grey.

    Args:
        ax: where to draw.
        matrix: (rows, columns).
        title, xlabel, ylabel: of the matrix, its columns and its rows.
        xticks, yticks: one label per column, per row; None for their numbers.
        signed: True for blue (negative) – white – red (positive); False for white – blue from 0.
        limit: the value of the last colour; None for the largest |entry|. If an entry exceeds it,
            the scale ends in an arrow.
        colorbar: whether to draw the scale.
        unit: words beside the scale; without any, a signed one says which colour is positive.

    Raises:
        ValueError: the matrix does not have two axes, is empty, or holds infinity.
    """
    values = _as_numbers(matrix)
    limit = limit or float(np.nanmax(np.abs(values))) or 1.0
    cmap = matplotlib.colormaps["RdBu_r" if signed else "Blues"].with_extremes(bad="#dddddd")
    picture = ax.imshow(values, cmap=cmap, vmin=-limit if signed else 0.0, vmax=limit)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if xticks is not None:
        ax.set_xticks(range(len(xticks)), xticks)
    if yticks is not None:
        ax.set_yticks(range(len(yticks)), yticks)
    if colorbar:
        _scale(picture, ax, unit, values)


def heatmaps(
    matrices: Mapping[str, Tensor | np.ndarray],
    *,
    xlabel: str = "",
    ylabel: str = "",
    signed: bool = True,
    limit: float | None = None,
    unit: str = "",
    size: tuple[float, float] | None = None,
) -> tuple[Figure, np.ndarray]:
    """Draw matrices side by side, all in the same colours, with one scale at the right.

    Args:
        matrices: title: matrix, as `heatmap` takes them.
        xlabel: under every picture; `ylabel`: at the first.
        signed, limit, unit: as in `heatmap`; None for the largest |entry| of all.
        size: width and height in inches; None for 4.2 high, and 12 wide from three on.

    Returns:
        The figure and its axes, one per matrix.
    """
    values = {title: _as_numbers(matrix) for title, matrix in matrices.items()}
    limit = limit or max(float(np.nanmax(np.abs(v))) for v in values.values()) or 1.0
    fig, axes = figure(1, len(values), size=size or (min(12.0, 4.5 * len(values)), 4.2))
    axes = np.atleast_1d(axes)
    for ax, (title, matrix) in zip(axes, values.items(), strict=True):
        heatmap(ax, matrix, title=title, xlabel=xlabel, signed=signed, limit=limit, colorbar=False)
    axes[0].set_ylabel(ylabel)
    _scale(axes[0].images[0], axes, unit, np.concatenate([v.ravel() for v in values.values()]))
    return fig, axes


def _as_numbers(matrix):
    values = matrix.detach().double().numpy() if isinstance(matrix, Tensor) else np.asarray(matrix)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"a heat map draws a matrix, got shape {values.shape}")
    if np.isinf(values).any():
        raise ValueError("a heat map has no colour for infinity; use NaN for missing entries")
    return values


def _scale(picture, axes, unit, values):
    """Draw the colour scale, which ends in an arrow if a value exceeds it."""
    low, high, slack = picture.norm.vmin, picture.norm.vmax, 1e-9 * picture.norm.vmax
    below, above = np.nanmin(values) < low - slack, np.nanmax(values) > high + slack
    extend = ("neither", "min", "max", "both")[int(below) + 2 * int(above)]
    bar = np.ravel(axes)[0].figure.colorbar(picture, ax=axes, shrink=0.8, extend=extend)
    bar.outline.set_visible(False)
    bar.set_label(unit or ("blue < 0 < red" if low < 0 else ""))


def save(fig: Figure, name: str, alt: str, *, stages: Sequence[Sequence[Artist]] = ()) -> None:
    """Show a figure in the notebook and, during the build, write it to figures/.

    Args:
        fig: made by `figure`.
        name: file name without ending, beginning with the notebook's number: "03_masks".
        alt: one or two sentences that describe the figure to readers who cannot see it.
        stages: for slides, where a figure without images grows: the artists (curves, words, axes)
            that each stage adds. All other artists are there from the start.

    Raises:
        ValueError: no alt text, a name with an ending or a folder, a name that this run of the
            build has already used, or a stage that adds nothing visible.
    """
    if not alt.strip():
        raise ValueError(f"figure {name} needs an alt text")
    if Path(name).name != name or "." in name:
        raise ValueError(f"a figure's name is a bare word such as 03_masks, got {name!r}")
    vector = not any(ax.images for ax in fig.axes)
    if stages and not vector:
        raise ValueError(f"figure {name} has images, which don't come in stages")
    data = _svg(fig, alt, name, stages) if vector else _png(fig)
    if folder := os.environ.get(FIGURES):
        if any(Path(folder).glob(f"{name}.*")):
            raise ValueError(f"there is a figure {name} already")
        (Path(folder) / f"{name}.{'svg' if vector else 'png'}").write_bytes(data)
    if not vector:
        display(Image(data, alt=alt))
        return
    svg = SVG(data).data
    shown = {"image/svg+xml": svg, "image/png": _png_beside(fig, svg), "text/plain": alt}
    width = round(96 * fig.get_figwidth())  # in a browser's pixels, as the SVG has it
    display(shown, metadata={"image/png": {"alt": alt, "width": width}}, raw=True)


def show_drawing(name: str, alt: str) -> None:
    """Draw what figures/drawings/NAME.py draws, then show and write it as `save` does.

    The file's function `draw` returns a figure, and the stages in which it grows on slides.

    Args:
        name: of the file without ending, and of the figure: "03_steps".
        alt: as in `save`.

    Raises:
        FileNotFoundError: neither the current folder nor one above it has figures/drawings/NAME.py.
    """
    file = Path("figures", "drawings", f"{name}.py")
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / file).exists():
            fig, stages = runpy.run_path(str(folder / file))["draw"]()
            save(fig, name, alt, stages=stages)
            return
    raise FileNotFoundError(f"no {file.as_posix()} in {Path.cwd()} or a folder above it")


def _svg(fig, alt, name, stages):
    """The figure as SVG, with a group for each artist of a stage."""
    for number, artists in enumerate(stages, start=1):
        arrows = [getattr(artist, "arrow_patch", None) for artist in artists]  # outside its group
        for place, artist in enumerate([*artists, *filter(None, arrows)]):
            artist.set_gid(f"stage-{number}-{place}")
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    for number in range(1, len(stages) + 1):
        if f'id="stage-{number}-' not in svg:
            raise ValueError(f"figure {name}: stage {number} adds nothing to be seen")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1).encode()


def _png(fig):
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png")
    return buffer.getvalue()


def _png_beside(fig, svg):
    """The figure in base64, for viewers that don't draw the SVG; it names the SVG by its hash."""
    drawn, packed = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=BESIDE_DPI)
    told = PIL.PngImagePlugin.PngInfo()
    told.add_text("Source", hashlib.sha256(svg.encode()).hexdigest())
    picture = PIL.Image.open(drawn).convert("RGB").quantize(BESIDE_COLORS)
    picture.save(packed, "png", optimize=True, pnginfo=told)
    return base64.b64encode(packed.getvalue()).decode()
