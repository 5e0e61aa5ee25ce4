"""Operators of a pass: what they compute and move, against counts by hand and against real runs."""

import pytest
import torch
import torch.nn.functional as F
from models import ask, built, ids, options, properties_in
from properties import normal

import cheems_ref.model
import cheems_ref.roofline as roofline
from cheems_ref.budget import count_flops
from cheems_ref.config import ModelConfig
from cheems_ref.retrieval import neurons

SIZE = 4  # bytes of a float32


def recorded(m, call):
    with m.Recorder() as recorder:
        call()
    return recorder.operators


def sums_of(operators):
    return sum(one.flops for one in operators), sum(one.moved for one in operators)


def operators_move_what_they_read_and_write(m):
    """Each a case with operations and bytes counted by hand."""
    a, b = torch.ones(6, 4), torch.ones(4, 5)
    table, rows = torch.ones(100, 4), torch.tensor([3, 1, 7])
    cases = {
        "a sum": (lambda: a + a, 0, 3 * 24),
        "a row for all": (lambda: a + torch.ones(4).expand(6, 4), 0, 24 + 4 + 24 + 4),
        "a product": (lambda: a @ b, 2 * 6 * 4 * 5, 24 + 20 + 30),
        "in place": (lambda: a.add_(1), 0, 2 * 24),
        "views": (lambda: (a.view(4, 6), a.mT, a[2:4], a.reshape(24), a.detach()), 0, 0),
        "a copy": (lambda: torch.empty(6, 4).copy_(a), 0, 2 * 24),
        "zeros of a shape": (lambda: (a.new_zeros(3), torch.zeros_like(b)), 0, 3 + 20),
        "out=": (lambda: torch.mm(a, b, out=torch.empty(6, 5)), 240, 24 + 20 + 30),
        "many at once": (lambda: torch._foreach_add_([a, b], 1), 0, 2 * (24 + 20)),
    }
    for name, (call, flops, numbers) in cases.items():
        assert sums_of(recorded(m, call)) == (flops, SIZE * numbers), name
    looked_up = sums_of(recorded(m, lambda: F.embedding(rows, table)))
    assert looked_up == (0, 3 * 8 + 2 * 3 * 4 * SIZE), "three rows of a table"
    into, two = torch.zeros(50, 4), torch.ones(3, 4)
    scattered = {
        "added in place": (lambda: into.index_add_(0, rows, two), 3 * 12),
        "added to a copy": (lambda: into.index_add(0, rows, two), 3 * 12 + 2 * 200),
    }
    for name, (call, numbers) in scattered.items():
        assert sums_of(recorded(m, call)) == (0, 3 * 8 + SIZE * numbers), name
    bags, x = rows.expand(2, 3).contiguous(), torch.ones(2, 4)
    inner = recorded(m, lambda: neurons(x, table, bags))[-1]
    assert (inner.flops, inner.moved) == (2 * 24, 6 * 8 + SIZE * (24 + 8 + 6)), "six rows"
    bag = recorded(m, lambda: F.embedding_bag(bags, table, mode="sum"))[-1]
    assert bag.flops == 2 * 24 and 24 * SIZE <= bag.moved - 6 * 8 - 8 * SIZE < 24 * SIZE + 64


def attention_counts_allowed_pairs(m):
    """Two products of the causal pairs forward, five backward; else all pairs."""
    for l, s, causal in ((5, 5, True), (3, 5, True), (5, 3, True), (5, 3, False)):
        q, k = normal(2, 3, l, 8, seed=1).float(), normal(2, 3, s, 8, seed=2).float()
        allowed = torch.ones(l, s).tril() if causal else torch.ones(l, s)  # as torch aligns it
        one = 2 * 2 * 3 * 8 * int(allowed.sum())
        for training, products in ((False, 2), (True, 7)):
            query = q.clone().requires_grad_(training)

            def call(query=query, k=k, causal=causal, training=training):
                y = F.scaled_dot_product_attention(query, k, k, is_causal=causal)
                if training:
                    y.sum().backward()

            assert sums_of(recorded(m, call))[0] == products * one, (l, s, causal, training)


def backward_passes_compute_twice_the_forward(m, case):
    """Two products for each of the forward pass; fused attention recomputes its scores."""
    config = ModelConfig(**options(case))
    counts = count_flops(config, 5)  # of one token, torch leaves outer products out
    forward, training = (m.pass_operators(config, 5, batch=2, training=t) for t in (False, True))
    assert forward.keys() == training.keys() == counts.keys()
    for part, flops in counts.items():
        got, both = (sums_of(listed[part])[0] for listed in (forward, training))
        if part == "I" and config.mask is not None:  # attention computes all pairs, and hides
            assert got > 2 * flops.total()
            continue
        assert got == 2 * flops.total(), f"{part}: {got}"
        if not (part == "I" and config.inner == "ssd"):
            # (Of the SSD inside I, one chunk: nobody reads what it hands on.)
            assert both == 3 * got + flops.pairs, f"{part}, backward"


def operators_are_those_of_a_real_pass(m, case):
    """Name by name, with operations and bytes; routed experts, whose loads differ, in sum."""
    config = ModelConfig(**options(case))
    net = built(cheems_ref.model, case, torch.float32)
    x, place = normal(2, 7, config.d_model, seed=3).float(), torch.zeros(2, 7, dtype=torch.int64)
    called = m.pass_operators(config, 7, batch=2)
    for block in net.blocks:
        letter, n = block.letter, config.pattern.count(block.letter)
        with torch.no_grad():
            real = recorded(m, lambda block=block: block(x, place))
        mine = called[letter][: len(called[letter]) // n]
        assert sums_of(mine)[0] == sums_of(real)[0], f"{letter}: operations"
        if letter not in "RHCX":
            assert [one.name for one in mine] == [one.name for one in real], letter
            assert mine == real, letter


def a_machine_takes_the_larger_of_two_times(m):
    """And its call beside; one operator after another."""
    machine = m.Machine(flops=100.0, bandwidth=10.0, launch=0.5)
    computes, moves = m.Operator("a", 1000, 10), m.Operator("b", 10, 1000)
    assert machine.seconds([]) == 0
    assert machine.seconds([computes]) == 0.5 + 10
    assert machine.seconds([moves]) == 0.5 + 100
    assert machine.seconds([computes, moves, moves]) == 1.5 + 210


HELD = properties_in(globals(), cases=("SEIE", "SHSRAH", "SDICAX", "SKIK", "IPAM", "SGIM"))


@pytest.mark.parametrize("has_property, case", HELD.values(), ids=HELD)
def test_the_room_has_the_property(has_property, case):
    ask(has_property, case, roofline)


def test_a_whole_pass_is_its_parts():
    """With the embedding's rows beside them; layers of one letter count together."""
    config = ModelConfig(**options("SEIE"))
    net = built(cheems_ref.model, "SEIE", torch.float32)
    with torch.no_grad():
        real = recorded(roofline, lambda: net(ids(2, 7), use_cache=False))
    parts = roofline.pass_operators(config, 7, batch=2)
    flops, moved = sums_of([one for part in parts.values() for one in part])
    assert sums_of(real)[0] == flops
    assert 0 <= sums_of(real)[1] - moved < 0.02 * moved
