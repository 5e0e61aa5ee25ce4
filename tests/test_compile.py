"""One graph: no layer asks the device anything, and torch compiles and exports whole models."""

import dataclasses
from functools import partial

import pytest
import torch
import whole as model
from models import ask, ids, options, properties_in
from properties import normal, questions, rows
from torch._dynamo.testing import CompileCounterWithBackend

from cheems_ref.verify import check

pytestmark = [
    pytest.mark.usefixtures("unchecked"),  # torch traces no type checker
    # torch's own, where it traces an autograd.Function
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
]

ROUTED = "RHCX"  # which group tokens by expert: how many there are for each, they have to ask
# --- questions to the device: properties of a module m; layers by themselves: test_layers.py ----


def made(m, case):
    torch.manual_seed(0)
    return m.CausalLM(m.ModelConfig(**options(case)))


def the_door_asks_twice(m, case):
    """For the smallest and the largest id; `stream` does so once, for its prompt."""
    net, tokens = made(m, case), ids(2, 9)
    at_most = sum(block.letter in ROUTED for block in net.blocks)
    with questions() as asked:
        net(tokens)
    assert len(asked) <= 2 + at_most, f"a call asks {asked}"
    steps = m.stream(net, tokens, 5, m.Sampling(top_k=5, top_p=0.9))
    next(steps)
    for _ in range(4):
        with questions() as asked:
            next(steps)
        assert len(asked) <= at_most, f"a decoded token asks {asked}"


# --- one graph ----------------------------------------------------------------------------------


@pytest.fixture
def net():
    """Every letter of a tiny Cheems once, and the first of them a second time."""
    config = model.preset("cheems-tiny")
    letters = "".join(dict.fromkeys(config.pattern))
    torch.manual_seed(0)
    return model.CausalLM(dataclasses.replace(config, pattern=letters + letters[0])).double()


def as_one_graph(net, backend):
    """The compiled model, and a counter of the graphs that it was compiled to."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(net, fullgraph=True, backend=counter), counter


@pytest.mark.program
def test_a_model_trains_as_one_graph(net):
    """Through autograd too, which traces the backward pass: logits and gradients."""
    run, counter = as_one_graph(net, "aot_eager")
    results = []
    for call in (run, net):
        net.zero_grad()
        logits, _ = call(ids(2, 12), use_cache=False)
        (logits * normal(*logits.shape, seed=8)).sum().backward()
        results.append((logits.detach(), torch.cat([p.grad.flatten() for p in net.parameters()])))
    for got, want in zip(*results, strict=True):
        check("compiled: training", got, want)
    assert counter.frame_count == 1


@pytest.mark.program
def test_generate_compiles_every_token_but_the_first(net, monkeypatch):
    """The ids stay; once lengths are known to vary, none compiles anew, nor does a second call."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    prompt, real = ids(2, 7), rows("..#####", "#######")
    options, graphs = dict(sampling=model.Sampling(temperature=0), padding_mask=real), []
    for n in (1, 2, 3, 9, 9):
        got = model.generate(net, prompt, n, compile=True, **options)
        assert torch.equal(got, model.generate(net, prompt, n, **options))
        graphs.append(counter.frame_count)
    assert graphs[:2] == [0, 1] and graphs[2] == graphs[-1] <= 3, f"graphs after each: {graphs}"


def test_a_model_is_exported(net):
    """For one length, with padding, and for a token after it."""
    tokens, real = ids(2, 12), torch.arange(12).expand(2, -1) > torch.tensor([[2], [0]])

    def exported(ids, **given):
        return torch.export.export(net, (ids,), given).module()(ids, **given)[0]

    with torch.no_grad():
        got, want = exported(tokens, padding_mask=real), net(tokens, padding_mask=real)[0]
        check("exported: a prompt", got[real], want[real])
        token, cache = tokens[:, :1], net(tokens)[1]
        check("exported: a token", exported(token, cache=cache), net(token, cache=cache)[0])


SMALL = dict(d_model=8, d_state=4, n_heads=4, vocab_size=19, chunk_size=16, n_neurons=16)
FAMILIES = [
    dict(pattern="SAIEKPM"),
    dict(pattern="AI", n_kv_heads=2, inner="ssd", mask="gate", max_positions=40),
    dict(pattern="AI", n_kv_heads=2, inner="linear", mask="content"),
    dict(pattern="I", inner="linear", mask="content", k_keys=3),
    dict(pattern="S", position="conv", tie_embeddings=False),
]


def small(**changes):
    torch.manual_seed(0)
    return model.CausalLM(model.ModelConfig(**SMALL | changes)).double()


@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_one_compiled_function_takes_texts_of_several_lengths(changes):
    net = small(**changes)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda tokens: net(tokens, use_cache=False)[0], fullgraph=True, backend="eager"
    )
    for length in (7, 12, 20):
        tokens = ids(2, length)
        check(f"compiled, {length} tokens", compiled(tokens), net(tokens)[0])


@pytest.mark.parametrize("pattern", ["SAIEKP", "MGDA", "AR", "AH", "AC", "AX"])
def test_a_model_is_exported_for_any_number_of_rows(pattern):
    """And without S, whose chunks depend on it, for any length; the routed letters as well."""
    net = small(pattern=pattern)
    rows, length = torch.export.Dim("rows", max=64), torch.export.Dim("length", min=2, max=64)
    shapes = {0: rows} if "S" in pattern else {0: rows, 1: length}
    with torch.no_grad():
        made = torch.export.export(
            net,
            (ids(2, 12),),
            dict(use_cache=False),
            dynamic_shapes=dict(input_ids=shapes, use_cache=None),
            strict=False,
        ).module()
        for tokens in (ids(5, 12), ids(3, 12 if "S" in pattern else 21)):
            check(f"exported: {pattern}", made(tokens, use_cache=False)[0], net(tokens)[0])


# --- the package has them ---------------------------------------------------------------------

HELD = properties_in(globals(), cases=("SEIE", "SHSRAH"))


@pytest.mark.parametrize("has_property, case", HELD.values(), ids=HELD)
def test_the_model_has_the_property(has_property, case):
    ask(has_property, case)
