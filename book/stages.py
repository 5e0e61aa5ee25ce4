"""Cut a figure of pixels into layers, which appear on slides one after the other.

`cheems_ref.plotting.save` leaves each figure with stages in the folder of the build, as a pickle;
`add_layers` turns it into metadata of the notebook. Figures of lines need none of this: their
stages are groups of the SVG.
"""

import io
import pickle
from base64 import b64decode, b64encode
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from nbformat import NotebookNode
from PIL import Image, ImageChops

from cheems_ref import plotting


def add_layers(notebook: NotebookNode, folder: Path) -> None:
    """Store the layers of every figure with stages beside its picture, and remove the pickles."""
    matplotlib.style.use(plotting.STYLE)
    pictures = {
        b64decode(output.data["image/png"]): output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    }
    for path in sorted(folder.glob("*.stages")):
        fig, stages = pickle.loads(path.read_bytes())
        shown = pictures[path.with_suffix(".png").read_bytes()]
        shown.metadata["image/png"]["stages"] = layers(fig, stages, path.stem)
        path.unlink()


def layers(fig: Figure, stages: Sequence[Sequence[Artist]], name: str) -> list[dict]:
    """Return the figure without its stages, then for each stage the part that it changes.

    Laid over one another they are the figure. `box` is left, top, width and height of a part, as
    fractions of the figure.

    Raises:
        ValueError: a stage changes nothing.
    """
    fig.set_layout_engine("none")
    for artist in [artist for stage in stages for artist in stage]:
        artist.set_visible(False)
    pictures = [_picture(fig)]
    for stage in stages:
        for artist in stage:
            artist.set_visible(True)
        pictures.append(_picture(fig))
    parts = [(pictures[0], (0, 0, *pictures[0].size))]
    for number, (before, after) in enumerate(pairwise(pictures), start=1):
        changed = ImageChops.difference(before, after).getbbox()
        if changed is None:
            raise ValueError(f"figure {name}: stage {number} adds nothing to be seen")
        parts.append((after.crop(changed), changed))
    width, height = pictures[0].size
    stored = []
    for picture, (left, top, right, bottom) in parts:
        buffer = io.BytesIO()
        picture.save(buffer, format="png")
        box = (left / width, top / height, (right - left) / width, (bottom - top) / height)
        png = b64encode(buffer.getvalue()).decode()
        stored.append({"png": png, "box": [round(share, 5) for share in box]})
    return stored


def _picture(fig):
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")
