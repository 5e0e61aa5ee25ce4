"""One quiet figure style for all notebooks: large type, few lines, colours that everyone can tell.

`figure` makes axes, `heatmap` draws a matrix, `save` shows the figure in the notebook and, while
the book is built, writes it to figures/. Line plots become SVG, which nbval compares; figures
that hold an image become PNG. The bytes are the same on every run.

The colours are those of Okabe and Ito (2008), in an order that also differs in lightness.
"""

import html
import io
import os
from pathlib import Path

import numpy as np
from torch import Tensor

try:
    import matplotlib
    from IPython.display import SVG, Image, display
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Figures need matplotlib and IPython, and there is no {error.name}: install them with "
        "pip install matplotlib ipython",
        name=error.name,
    ) from error

INK, QUIET = "#222222", "#8a8a8a"
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]

STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.family": "DejaVu Sans",
    "font.size": 14,
    "axes.titlesize": 15,
    "axes.titlelocation": "left",
    "axes.labelsize": 14,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": matplotlib.cycler(color=COLORS),
    "axes.grid": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "lines.linewidth": 2.4,
    "lines.markersize": 7,
    "legend.frameon": False,
    "legend.fontsize": 13,
    "image.interpolation": "nearest",
    "svg.hashsalt": "cheems_ref",  # else the ids in an SVG are random
}

# The folder that `save` writes to, where this variable names one: only the build sets it, so a
# reader's run changes no file.
FIGURES = "CHEEMS_FIGURES"


def figure(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] | None = None
) -> tuple[Figure, Axes | np.ndarray]:
    """Make a figure in the project's style.

    Args:
        rows, columns: number of axes.
        size: width and height in inches; None for 5 × 3.6 per axes, at most 12 wide.

    Returns:
        The figure and its axes, as `Figure.subplots` returns them.
    """
    matplotlib.rcParams.update(STYLE)  # titles and legends take it when they are made, so for good
    fig = Figure(figsize=size or (min(5.0 * columns, 12.0), 3.6 * rows), layout="constrained")
    return fig, fig.subplots(rows, columns)


def heatmap(
    ax: Axes,
    matrix: Tensor | np.ndarray,
    *,
    title: str = "",
    signed: bool = True,
    limit: float | None = None,
    colorbar: bool = True,
) -> None:
    """Draw a matrix as a picture, row 0 on top; entries that are NaN stay grey.

    Args:
        ax: where to draw.
        matrix: (rows, columns).
        title: what the matrix is.
        signed: True for blue–white–red around 0; False for white–blue from 0 up.
        limit: the value at the end of the colours; None for the largest |entry|.
        colorbar: whether to draw the scale.

    Raises:
        ValueError: the matrix does not have two axes, is empty, or holds infinity.
    """
    values = matrix.detach().double().numpy() if isinstance(matrix, Tensor) else np.asarray(matrix)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"a heat map draws a matrix, got shape {values.shape}")
    if np.isinf(values).any():
        raise ValueError("a heat map has no colour for infinity; use NaN for what is not there")
    limit = limit or float(np.nanmax(np.abs(values))) or 1.0
    cmap = matplotlib.colormaps["RdBu_r" if signed else "Blues"].with_extremes(bad="#dddddd")
    picture = ax.imshow(values, cmap=cmap, vmin=-limit if signed else 0.0, vmax=limit)
    ax.set_title(title)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    if colorbar:
        ax.figure.colorbar(picture, ax=ax, shrink=0.8).outline.set_visible(False)


def save(fig: Figure, name: str, alt: str) -> None:
    """Show a figure in the notebook and, during the build, write it to figures/.

    Args:
        fig: made by `figure`.
        name: file name without ending, beginning with the notebook's number: "03_masks".
        alt: one or two sentences that say what there is to see, for those who cannot see it.

    Raises:
        ValueError: no alt text, a name with an ending or a folder, or a name that this run of the
            build has used already.
    """
    if not alt.strip():
        raise ValueError(f"figure {name} needs an alt text")
    if Path(name).name != name or "." in name:
        raise ValueError(f"a figure's name is a bare word such as 03_masks, got {name!r}")
    vector = not any(ax.images for ax in fig.axes)
    data = _svg(fig, alt) if vector else _png(fig)
    if folder := os.environ.get(FIGURES):
        if any(Path(folder).glob(f"{name}.*")):
            raise ValueError(f"there is a figure {name} already")
        (Path(folder) / f"{name}.{'svg' if vector else 'png'}").write_bytes(data)
    display(SVG(data) if vector else Image(data, alt=alt))


def _svg(fig, alt):
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1).encode()


def _png(fig):
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png")
    return buffer.getvalue()
