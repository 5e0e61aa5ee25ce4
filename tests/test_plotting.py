"""Figures: same bytes on every run, readable by everyone, written only where the build asks."""

import hashlib
import io
import re
from base64 import b64decode

import matplotlib
import numpy as np
import PIL.Image
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb

from cheems_ref import plotting


@pytest.fixture
def shown(monkeypatch):
    """What `save` displays, in place of a notebook."""
    outputs = []

    def keep(data, *, metadata=None, raw=False):
        outputs.append(data)

    monkeypatch.setattr(plotting, "display", keep)
    return outputs


def line_plot():
    fig, ax = plotting.figure()
    ax.plot([0, 1, 4], label="squares")
    ax.legend()
    ax.set_title("$x^2$")
    return fig


def picture():
    fig, ax = plotting.figure()
    plotting.heatmap(ax, torch.eye(3), title="unit matrix")
    return fig


@pytest.mark.parametrize("draw, name", [(line_plot, "03_a.svg"), (picture, "03_a.png")])
def test_same_bytes_on_every_run(draw, name, shown, tmp_path, monkeypatch):
    monkeypatch.setenv(plotting.FIGURES, str(tmp_path))
    contents = []
    for _ in range(2):
        plotting.save(draw(), "03_a", "what there is to see")
        assert [path.name for path in tmp_path.iterdir()] == [name]
        contents.append((tmp_path / name).read_bytes())
        (tmp_path / name).unlink()
    assert contents[0] == contents[1] and len(shown) == 2


def test_a_reader_sees_both_kinds_with_their_alt_text_and_writes_no_file(
    shown, tmp_path, monkeypatch
):
    monkeypatch.delenv(plotting.FIGURES, raising=False)
    monkeypatch.chdir(tmp_path)
    plotting.save(line_plot(), "03_a", 'squares of "x" & more')
    plotting.save(picture(), "03_b", "a unit matrix")
    svg, png = shown
    assert 'role="img" aria-label="squares of &quot;x&quot; &amp; more"' in svg["image/svg+xml"]
    assert svg["text/plain"] == 'squares of "x" & more'
    assert png.alt == "a unit matrix" and list(tmp_path.iterdir()) == []


def test_a_png_stands_beside_the_svg_and_names_it(shown):
    """For a JupyterLab that doesn't trust the notebook. It's the same picture, small in bytes."""
    for _ in range(2):
        plotting.save(line_plot(), "03_a", "squares")
    assert shown[0] == shown[1]  # the same bytes on one machine
    beside = PIL.Image.open(io.BytesIO(b64decode(shown[0]["image/png"])))
    svg = shown[0]["image/svg+xml"]
    assert beside.text == {"Source": hashlib.sha256(svg.encode()).hexdigest()}
    points = [float(n) for n in re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups()]
    assert beside.size == tuple(round(2 * n) for n in points)  # 144 dots, 72 points an inch
    colors = np.array(beside.convert("RGB")).reshape(-1, 3).astype(int)
    assert (colors == 255).all(1).mean() > 0.8  # white ground, and a blue curve
    blue = np.array(to_rgb(plotting.COLORS[0])) * 255
    assert (np.abs(colors - blue).max(1) < 8).mean() > 0.003
    assert len(shown[0]["image/png"]) < 20_000


def test_what_cannot_be_drawn_or_saved_is_refused(shown):
    _, ax = plotting.figure()
    fig = line_plot()
    nothing = dict(stages=[fig.axes[0].lines, []])
    squares, (first, _) = plotting.heatmaps({"a": torch.eye(2), "b": torch.eye(2)})
    images = dict(stages=[[first]])
    for message, call, *arguments, options in (
        ("needs an alt text", plotting.save, fig, "03_a", " ", {}),
        ("bare word", plotting.save, fig, "03_a.png", "squares", {}),
        ("bare word", plotting.save, fig, "../03_a", "squares", {}),
        ("03_a: stage 2 adds nothing to be seen", plotting.save, fig, "03_a", "squares", nothing),
        ("03_a has images", plotting.save, squares, "03_a", "squares", images),
        (r"\(2, 2, 2\)", plotting.heatmap, ax, torch.zeros(2, 2, 2), {}),
        (r"\(0, 3\)", plotting.heatmap, ax, torch.zeros(0, 3), {}),
        ("infinity", plotting.heatmap, ax, torch.full((2, 2), -torch.inf), {}),
        ("curve 'a' has 3 values for 2 places", plotting.lines, ax, [0, 1], {"a": [1, 2, 3]}, {}),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments, **options)
    assert shown == []
    plotting.heatmap(ax, np.zeros((2, 2)))  # all zero: no division by zero


def contrast(color, ground):
    """As WCAG defines it: from 1 to 21."""
    light = []
    for one in (color, ground):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(one)]
        light.append(np.dot([0.2126, 0.7152, 0.0722], linear) + 0.05)
    return max(light) / min(light)


def test_letters_and_curves_stand_out_from_the_ground():
    style = matplotlib.rc_params_from_file(plotting.STYLE)
    ground, curves = style["axes.facecolor"], style["axes.prop_cycle"].by_key()["color"]
    assert style["figure.facecolor"] == ground
    for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"):
        assert contrast(style[name], ground) > 7, name  # what WCAG calls AAA
    assert min(contrast(color, ground) for color in curves) > 2
    assert [to_hex(color).upper() for color in curves] == plotting.COLORS
    blue, *others = plotting.COLORS
    assert contrast("white", blue) > 4.5
    assert min(contrast(plotting.ON_COLOR, color) for color in others) > 4.5


def test_heat_map_draws_the_matrix_it_was_given():
    """Red above zero, blue below, white at zero, grey where there is no number; row 0 on top."""
    _, ax = plotting.figure()
    matrix = torch.tensor([[1.0, 0.0], [-1.0, torch.nan]])
    plotting.heatmap(ax, matrix, colorbar=False)
    image = ax.images[0]
    (red, white), (blue, grey) = image.to_rgba(image.get_array())[..., :3]
    assert red[0] > red[2] + 0.2 and blue[2] > blue[0] + 0.2
    assert white.min() > 0.94 and to_hex(grey) == "#dddddd"
    assert image.get_extent() == [-0.5, 1.5, 1.5, -0.5]


def test_curves_are_told_apart_and_drawn_as_given():
    _, ax = plotting.figure()
    curves = {"a": torch.tensor([1.0, 2.0]), "b": [2.0, 3.0], "_c": [4.0, 4.0]}
    plotting.lines(ax, [0, 1], curves, xlabel="steps", ylabel="loss", title="two", yscale="log")
    plotting.lines(ax, [0, 1], {"d": [5, 5]}, marker="o", xticks={0: "no", 1: "yes"})
    assert [list(line.get_ydata()) for line in ax.lines] == [[1, 2], [2, 3], [4, 4], [5, 5]]
    assert len({line.get_color() for line in ax.lines}) == 4  # goes on where it stopped
    assert len({str(line._dash_pattern) for line in ax.lines[:3]}) == 3
    assert [line.get_marker() for line in ax.lines] == ["", "", "", "o"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b", "d"]
    assert (ax.get_yscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "steps", "loss")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["no", "yes"]


def test_heat_maps_share_one_scale():
    matrices = {"one": torch.eye(2), "two": -3 * torch.eye(2)}
    fig, axes = plotting.heatmaps(matrices, xlabel="s", ylabel="t")
    assert [ax.get_title("left") for ax in axes] == ["one", "two"]
    assert {ax.images[0].get_clim() for ax in axes} == {(-3.0, 3.0)}
    assert [ax.get_ylabel() for ax in axes] == ["t", ""] and axes[1].get_xlabel() == "s"
    assert len(fig.axes) == 3 and fig.axes[2].get_ylabel() == "blue < 0 < red"


def test_stages_of_curves_are_groups_of_the_svg(shown):
    fig = line_plot()
    [ax] = fig.axes
    plotting.save(fig, "03_a", "squares", stages=[ax.lines, [ax.get_legend(), ax.spines["left"]]])
    svg = shown[0]["image/svg+xml"]
    assert [f'<g id="stage-{name}"' in svg for name in ("1-0", "2-0", "2-1")] == [True] * 3
    assert svg.count("stage-") == 3


def test_an_arrow_comes_with_its_stage(shown):
    fig, ax = plotting.canvas(2, 2)
    plotting.arrow(ax, (0, 0), (1, 1))
    plotting.save(fig, "03_a", "an arrow", stages=[ax.texts])
    before, drawn = shown[0]["image/svg+xml"].split('<g id="stage-1-')
    assert drawn.count("stroke: #8a8a8a") == 2 and "#8a8a8a" not in before


def test_a_stage_has_what_its_part_drew():
    _, ax = plotting.canvas(4, 3)
    parts = [
        lambda ax: plotting.box(ax, 1, 1, "first"),
        lambda ax: plotting.box(ax, 2, 1, "second"),
    ]
    first, second = plotting.in_stages(ax, *parts)
    assert [a.get_text() for a in first] == ["first"]
    assert [a.get_text() for a in second] == ["second"]
