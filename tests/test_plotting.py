"""Figures: same bytes on every run, readable by everyone, written only where the build asks."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from cheems_ref import plotting


@pytest.fixture
def shown(monkeypatch):
    """What `save` displays, in place of a notebook."""
    outputs = []
    monkeypatch.setattr(plotting, "display", outputs.append)
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


def test_a_reader_writes_no_file(shown, tmp_path, monkeypatch):
    monkeypatch.delenv(plotting.FIGURES, raising=False)
    monkeypatch.chdir(tmp_path)
    plotting.save(line_plot(), "03_a", "squares")
    assert list(tmp_path.iterdir()) == [] and "svg" in shown[0].data


def test_alt_text_is_there_for_both_kinds(shown):
    plotting.save(line_plot(), "03_a", 'squares of "x" & more')
    plotting.save(picture(), "03_b", "a unit matrix")
    svg, png = shown
    assert 'role="img" aria-label="squares of &quot;x&quot; &amp; more"' in svg.data
    assert png.alt == "a unit matrix"
    with pytest.raises(ValueError, match="needs an alt text"):
        plotting.save(line_plot(), "03_a", " ")


def test_no_id_is_there_twice(shown):
    """A page may hold the drawing itself."""
    fig, axes = plotting.figure(1, 2)
    for ax in axes:
        plotting.lines(ax, [0, 1], {"a": [1, 2], "b": [2, 3]})
        plotting.lines(ax, [0, 1], {"c": [1, 2]})
    plotting.save(fig, "03_a", "lines")
    ids = re.findall(r' id="([^"]*)"', shown[0].data)
    assert len(ids) > 20 and len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", ["03_a.png", "figures/03_a", "../03_a"])
def test_names_are_bare_words(name):
    with pytest.raises(ValueError, match="bare word"):
        plotting.save(line_plot(), name, "squares")


def test_heat_map_draws_the_matrix_it_was_given(shown, tmp_path, monkeypatch):
    """nbval does not compare pictures, so the drawing itself is checked here."""
    monkeypatch.setenv(plotting.FIGURES, str(tmp_path))
    fig, ax = plotting.figure(size=(3.0, 3.0))
    plotting.heatmap(ax, torch.tensor([[1.0, 0.0], [-1.0, torch.nan]]), colorbar=False)
    plotting.save(fig, "03_a", "four fields")
    pixels = np.asarray(Image.open(tmp_path / "03_a.png").convert("RGB")).astype(int)
    (left, bottom), (right, top) = ax.get_window_extent().get_points().astype(int)
    rows, columns = pixels.shape[0] - np.array([top, bottom]), np.array([left, right])

    def field(row, column):
        y = rows[0] + (rows[1] - rows[0]) * (2 * row + 1) // 4
        x = columns[0] + (columns[1] - columns[0]) * (2 * column + 1) // 4
        return pixels[y, x]

    red, blue = field(0, 0), field(1, 0)
    assert red[0] > red[2] + 50 and blue[2] > blue[0] + 50
    assert field(0, 1).min() > 240  # zero is white
    assert set(field(1, 1)) == {0xDD}  # NaN is grey


def test_heat_map_takes_matrices_only():
    _, ax = plotting.figure()
    with pytest.raises(ValueError, match=r"\(2, 2, 2\)"):
        plotting.heatmap(ax, torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match=r"\(0, 3\)"):
        plotting.heatmap(ax, torch.zeros(0, 3))
    with pytest.raises(ValueError, match="infinity"):
        plotting.heatmap(ax, torch.full((2, 2), -torch.inf))
    plotting.heatmap(ax, np.zeros((2, 2)))  # all zero: no division by zero


def test_curves_are_told_apart_and_drawn_as_given():
    _, ax = plotting.figure()
    curves = {"a": torch.tensor([1.0, 2.0]), "b": [2.0, 3.0], "_c": [4.0, 4.0]}
    plotting.lines(ax, [0, 1], curves, xlabel="steps", ylabel="loss", title="two", yscale="log")
    plotting.lines(ax, [0, 1], {"d": [5, 5]}, joined=False, xticks={0: "no", 1: "yes"})
    assert [list(line.get_ydata()) for line in ax.lines] == [[1, 2], [2, 3], [4, 4], [5, 5]]
    assert len({line.get_color() for line in ax.lines}) == 4  # goes on where it stopped
    assert len({str(line._dash_pattern) for line in ax.lines[:3]}) == 3
    assert ax.lines[3].get_linestyle() == "None" and ax.lines[3].get_marker() == "o"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b", "d"]
    assert (ax.get_yscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "steps", "loss")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["no", "yes"]


def test_a_curve_of_another_length_is_refused():
    _, ax = plotting.figure()
    with pytest.raises(ValueError, match="curve 'a' has 3 values for 2 places"):
        plotting.lines(ax, [0, 1], {"a": [1, 2, 3]})


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
    svg = shown[0].data
    assert [f'<g id="stage-{name}"' in svg for name in ("1-0", "2-0", "2-1")] == [True] * 3
    assert svg.count("stage-") == 3


def test_a_stage_that_shows_nothing_is_refused(shown):
    fig = line_plot()
    with pytest.raises(ValueError, match="03_a: stage 2 adds nothing to be seen"):
        plotting.save(fig, "03_a", "squares", stages=[fig.axes[0].lines, []])
    assert shown == []
