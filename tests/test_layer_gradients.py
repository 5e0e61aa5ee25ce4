"""Every layer's gradients, by its input and by every parameter, are those of its definition.

A row of the table makes a layer and its input. It gives y of the layer, and y of the definition
that test_ssd, test_attention, test_experts or test_mamba has for it. The definition of a stack is
the composition of theirs. The planted tables put `.detach()` where a forward uses its input: then
the values stay right, and whatever lies below no longer learns.
"""

import itertools

import pytest
import test_attention
import test_experts
import test_mamba
import test_ssd
import torch
import torch.nn.functional as F
from models import SIZES, built, ids
from properties import forward, normal

from cheems_ref import attention, config, experts, mamba, model, ssd
from cheems_ref.verify import check


def attention_by_hand(mixer, x):
    def inner(x, positions):
        if hasattr(mixer.inner, "A_log"):
            return test_ssd.by_hand(mixer.inner, x)[0]
        retrieved = hasattr(mixer.inner, "keys")
        return test_attention.values_by_hand(mixer.inner, x) if retrieved else mixer.inner(x)

    return test_attention.by_hand(mixer, x, torch.ones(x.shape[:2]).bool(), inner)[0]


def ssd_row(m, position):
    mixer, x = test_ssd.layer(m, position), test_ssd.tokens().requires_grad_()
    return mixer, x, forward(mixer, x)[0], test_ssd.by_hand(mixer, x)[0]


def attention_row(m, *combo):
    mixer, x = test_attention.layer(m, combo), test_attention.tokens(5).requires_grad_()
    return mixer, x, forward(mixer, x)[0], attention_by_hand(mixer, x)


def state_mixer_row(m, name):
    mixer, x = test_experts.layer(m, name), normal(2, 5, test_experts.D, seed=1).requires_grad_()
    parameters, options = dict(mixer.named_parameters()), test_experts.LAYERS[name]
    return mixer, x, mixer(x), test_experts.equation(name, parameters, x, options, [])


def mamba_row(m, selective, scan):
    mixer, x = test_mamba.mamba(m, selective, scan=scan), normal(2, 7, 6).requires_grad_()
    return mixer, x, mixer(x)[0], test_mamba.by_hand(mixer, x)[0]


ROUTED = dict(n_experts=SIZES["n_experts"], k=SIZES["k_experts"])
NEURONS = dict(n_experts=SIZES["n_neurons"], k=SIZES["k_neurons"])
NEURONS |= dict(n_heads=SIZES["n_retrieval_heads"])
EQUATIONS = {
    "M": ("MLP", {}),
    "G": ("MLP", dict(gated=True)),
    "D": ("DGLU", {}),
    "R": ("MoE", ROUTED),
    "H": ("SharedExpertMoE", ROUTED),
    "C": ("CohesiveMoE", ROUTED),
    "X": ("ExpansiveMoE", ROUTED),
    "P": ("PEER", NEURONS),
    "K": ("CDMMoE", NEURONS),
    "E": ("CDMoE", NEURONS),
}


def layer_by_hand(letter, mixer, x):
    if letter == "S":
        return test_ssd.by_hand(mixer, x)[0]
    if letter in "AI":
        return attention_by_hand(mixer, x)
    name, options = EQUATIONS[letter]
    return test_experts.equation(name, dict(mixer.named_parameters()), x, options, [])


def stack_row(m, pattern, **options):
    """The input is what the embedding hands on."""
    net, embedded = built(m, dict(pattern=pattern) | options), []
    net.embedding.register_forward_hook(lambda layer, args, y: embedded.append(y))
    logits, _ = net(ids(2, 5))

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + SIZES["norm_eps"]).sqrt() * weight

    x = embedded[0]
    for letter, block in zip(pattern, net.blocks, strict=True):
        x = x + layer_by_hand(letter, block.layer, norm(x, block.norm.weight))
    head = net.embedding if net.lm_head is None else net.lm_head
    return net, embedded[0], logits, F.linear(norm(x, net.norm.weight), head.weight)


ROWS = {
    **{("SSD", position): (ssd, ssd_row) for position in test_ssd.POSITIONS},
    **{
        ("attention", *combo): (attention, attention_row)
        for combo in itertools.product(test_attention.INNER, test_attention.MASKS, ["g = 2"])
    },
    **{("state mixer", name): (experts, state_mixer_row) for name in test_experts.LAYERS},
    **{
        ("Mamba", selective, scan): (mamba, mamba_row)
        for selective, scan in itertools.product((True, False), test_mamba.SCANS)
    },
    **{("stack", pattern): (model, stack_row) for pattern in ("SMIGAD", "RSHICAX", "PIKSE")},
}


def learns_as_defined(m, *row):
    mixer, x, y, want = ROWS[row][1](m, *row[1:])
    named = {"x": x} | dict(mixer.named_parameters())
    check(f"{row}: y", y, want)
    weights = normal(*y.shape, seed=8)
    grads = (
        torch.autograd.grad(
            (t * weights).sum(), named.values(), retain_graph=True, materialize_grads=True
        )
        for t in (y, want)  # of a stack both begin with one embedding
    )
    for name, got, expected in zip(named, *grads, strict=True):
        assert expected.any(), f"{row}: {name} has no gradient to compare"
        check(f"{row}: gradient of {name}", got, expected)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(map(str, row)))
def test_gradients_are_those_of_the_definition(row):
    learns_as_defined(ROWS[row][0], *row)


def test_every_layer_of_a_pattern_is_in_a_stack():
    assert {letter for kind, letters, *_ in ROWS if kind == "stack" for letter in letters} == set(
        config.LAYERS
    )
