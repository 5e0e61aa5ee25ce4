"""Shapes in signatures are checked in this run, in every room that has any."""

from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import zeros

import cheems_ref.linear_attention as la
import cheems_ref.model as model
import cheems_ref.ssd as ssd
from cheems_ref import (
    attention,
    convolution,
    distributed,
    experts,
    feed_forward,
    kernels,
    mamba,
    retrieval,
    rope,
    state_space,
    tasks,
    text,
    train,
)

X, DT, A, B = zeros(2, 5, 4, 3), zeros(2, 5, 4), zeros(4), zeros(2, 5, 2, 2)
IDS = zeros(2, 5, dtype=torch.int64)

# Of every room one call in which a tensor does not fit the others, or the function.
WRONG = {
    "attention": lambda: attention.attention(X, B, B[:, :4]),
    "convolution": lambda: convolution.short_convolution(DT, A[None]),
    "distributed": lambda: distributed.ssd_sequence_parallel(X, DT, A[:2], B, B),
    "experts": lambda: experts.MoE(4, 3, n_experts=5, k=2)(DT[0]),
    "feed_forward": lambda: feed_forward.MLP(4, 3)(DT.long()),
    "kernels": lambda: kernels.chunk_scan(X, DT, A[:2], B, B),
    "linear_attention": lambda: la.linear_attention(X, X[..., :2], X),
    "mamba": lambda: mamba.selective_scan(DT, DT, zeros(2, 3), zeros(2, 5, 3), zeros(2, 5, 3)),
    "model": lambda: model.sample(DT),
    "retrieval": lambda: retrieval.product_key_topk(X[..., None, :], zeros(4, 2, 9, 3), 2),
    "rope": lambda: rope.apply_rope(X[..., :2], B[:, :, 0], B[:, :4, 0]),
    "ssd": lambda: ssd.ssd_chunked(X, DT, A[:2], B, B),
    "state_space": lambda: state_space.discretize_zoh(zeros(3, 3), zeros(2), 0.1),
    "tasks": lambda: tasks.needle(2, 100, 0.5, haystack=IDS),
    "text": lambda: text.ids_to_text(IDS),
    "train": lambda: train.split_text(IDS, 0.1),
}


def test_every_room_with_shapes_in_its_signatures_has_such_a_call():
    rooms = Path(model.__file__).parent.glob("*.py")
    assert {path.stem for path in rooms if "from jaxtyping import" in path.read_text()} == {*WRONG}


@pytest.mark.parametrize("room", WRONG)
def test_shapes_in_signatures_are_checked_in_this_run(request, room):
    if not request.config.getoption("--jaxtyping-packages", default=None):
        pytest.skip("pytest runs without --jaxtyping-packages")
    with pytest.raises(jaxtyping.TypeCheckError):
        WRONG[room]()
