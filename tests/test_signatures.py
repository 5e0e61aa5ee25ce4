"""Shapes in signatures are checked in this run, where it has --jaxtyping-packages."""

import inspect
import typing

import jaxtyping
import pytest
from torch import zeros

from cheems_ref import mamba, rope, ssd


def test_shapes_in_signatures_are_checked_in_this_run(request):
    if not request.config.getoption("--jaxtyping-packages", default=None):
        pytest.skip("pytest runs without --jaxtyping-packages")
    x, dt, A, B = zeros(2, 5, 4, 3), zeros(2, 5, 4), zeros(4), zeros(2, 5, 2, 2)
    with pytest.raises(jaxtyping.TypeCheckError):
        ssd.ssd_chunked(x, dt, A[:2], B, B)
    with pytest.raises(jaxtyping.TypeCheckError):
        rope.apply_rope(x[..., :2], B[:, :, 0], B[:, :4, 0])


def test_forms_have_the_hints_of_their_signatures():
    for form in (ssd.ssd_recurrent, ssd.ssd_kernel, mamba.selective_scan):
        assert {*typing.get_type_hints(form)} == {*inspect.signature(form).parameters, "return"}
