"""torch.func: gradients of single examples, through every operator and every layer of a model."""

import pytest
import torch
import whole as model
from models import ids, options
from test_operators import OPERATORS
from torch.func import functional_call, grad, vmap

from cheems_ref.config import LAYERS, ROUTED, SEQUENCE_MIXERS
from cheems_ref.verify import check

pytestmark = [
    pytest.mark.usefixtures("unchecked"),  # torch.func's tensors have one axis less than they show
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # torch's own
]

# Kernels have no gradient that torch.func could take apart, and a matrix is of one position.
APART = ("kernel", "triton", "rotation_matrix")
BY_ROW = [name for name in OPERATORS if not any(word in name for word in APART)]


def total(result):
    """A number that depends on all of y, and of the state if there is one."""
    parts = result if isinstance(result, tuple) else (result,)
    return sum((part * part.detach().cos()).sum() for part in parts)


@pytest.mark.parametrize("name", BY_ROW)
def test_an_operator_has_the_gradient_of_each_row(name):
    row = OPERATORS[name]
    inputs = row.inputs(3, 6)
    by_row = [n for n in (*row.by_token, row.state) if n and inputs[n].is_floating_point()]
    by_row = [n for n in by_row if inputs[n].shape[0] == 3]
    alike = {n: t for n, t in inputs.items() if n not in by_row and n not in row.by_token}
    whole_numbers = [n for n in row.by_token if n not in by_row]

    def of_one(floats, others):
        given = {n: t[None] for n, t in (floats | others).items()}
        return total(row.function(**given, **alike))

    floats = {n: inputs[n] for n in by_row}
    others = {n: inputs[n] for n in whole_numbers}
    got = vmap(grad(of_one), randomness="same")(floats, others)  # some rows draw a mask
    leaves = {n: t.clone().requires_grad_() for n, t in floats.items()}
    y = total(row.function(**leaves, **others, **alike))
    want = torch.autograd.grad(y, [*leaves.values()], materialize_grads=True)
    for n, t in zip(leaves, want, strict=True):
        check(f"{name}: gradient of {n}, row by row", got[n], t)


INNER = [dict(inner="ssd"), dict(inner="linear", n_kv_heads=2, mask="content", k_keys=3)]
INNER += [dict(inner="retrieved", mask="gate", max_positions=9)]
MODELS = [(letter, {}) for letter in LAYERS] + [("I", changes) for changes in INNER]
MODELS += [("S", dict(position="conv")), ("E", dict(tie_embeddings=False))]


@pytest.mark.parametrize("letter, changes", MODELS, ids=str)
def test_a_model_has_the_gradient_of_each_text(letter, changes):
    """With torch.func.grad for every letter, and all texts at once where no expert is routed to."""
    pattern = letter if letter in SEQUENCE_MIXERS else "S" + letter
    torch.manual_seed(0)
    net = model.CausalLM(model.ModelConfig(**options(dict(pattern=pattern) | changes))).double()
    parameters, texts = dict(net.named_parameters()), ids(3, 7)

    def loss(parameters, text):
        logits, _ = functional_call(net, parameters, (text[None],), dict(use_cache=False))
        return torch.nn.functional.cross_entropy(logits[0, :-1], text[1:])

    def by_autograd(text):
        leaves = [*parameters.values()]
        return torch.autograd.grad(loss(parameters, text), leaves, materialize_grads=True)

    got = grad(loss)(parameters, texts[0])
    for name, want in zip(parameters, by_autograd(texts[0]), strict=True):
        check(f"{letter}: gradient of {name} for one text", got[name], want)
    if letter in ROUTED:
        return
    got = vmap(grad(loss), in_dims=(None, 0))(parameters, texts)
    for i, text in enumerate(texts):
        for name, want in zip(parameters, by_autograd(text), strict=True):
            check(f"{letter}: gradient of {name} for text {i}", got[name][i], want)


def test_neurons_of_many_tables_are_computed_at_once():
    """Tables, tokens or indices may have the axis of the examples, wherever it stands."""
    from cheems_ref.retrieval import neurons

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, 5, generator=generator).double()
    table = torch.randn(3, 5, 4, generator=generator).double()
    indices = torch.randint(3, (4, 2, 6), generator=generator)
    for dims in ((0, 2, 0), (None, 2, 0), (0, None, 0), (0, 2, None), (0, None, None)):
        tensors = (x, table, indices)
        given = [
            t if d is not None else t.select(axis, 0)
            for t, d, axis in zip(tensors, dims, (0, 2, 0), strict=True)
        ]
        got = vmap(neurons, in_dims=dims)(*given)
        for example in range(4):
            one = [
                t if d is None else t.select(d, example) for t, d in zip(given, dims, strict=True)
            ]
            check(f"neurons, axes {dims}", got[example], neurons(*one))
