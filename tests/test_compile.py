"""One graph: no layer asks the device anything, and torch compiles and exports whole models."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
import whole as model
from models import (
    MODELS,
    TINY,
    ask,
    built,
    ids,
    options,
    titled,
)
from properties import normal, questions, rows
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from cheems_ref.verify import check

pytestmark = [
    pytest.mark.usefixtures("unchecked"),  # torch traces no type checker
    # torch's own, where it traces an autograd.Function
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
]

ROUTED = "RHCX"  # which group tokens by expert: how many there are for each, they have to ask
THROUGH_AUTOGRAD = ("cheems-tiny", "mamba2-tiny")
ASKING_NOTHING = [name for name in TINY if not set(model.preset(name).pattern) & set(ROUTED)]

# --- questions to the device: properties of a module m ----------------------------------------


def made(m, case):
    torch.manual_seed(0)
    return m.CausalLM(m.preset(case) if case in TINY else m.ModelConfig(**options(case)))


def layers_ask_nothing(m, case):
    """Routed experts once per layer; prompt, padded prompt, decoding and training."""
    net, tokens, real = made(m, case), ids(2, 9), rows("..#######", "#######..")
    at_most = sum(block.letter in ROUTED for block in net.blocks)
    with questions() as asked:
        x, cache = net.hidden_states(tokens, validate=False)
    assert len(asked) <= at_most, f"a prompt asks {asked}"
    with questions() as asked:
        net.logits(x).square().mean().backward()
    assert not asked, f"the backward pass asks {asked}"
    with torch.no_grad(), questions() as asked:
        _, padded = net.hidden_states(tokens, padding_mask=real, validate=False)
    assert len(asked) <= at_most, f"a padded prompt asks {asked}"
    for held in (cache, padded):
        with torch.no_grad(), questions() as asked:
            net.hidden_states(tokens[:, :1], cache=held, validate=False)
        assert len(asked) <= at_most, f"a decoded token asks {asked}"


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


def layers_run_without_values(m, case):
    """On tensors that have none: fake ones, and those of the meta device."""
    for mode, device in ((contextlib.nullcontext(), "meta"), (FakeTensorMode(), "cpu")):
        with mode:
            with torch.device(device):
                net, tokens = made(m, case), torch.zeros(2, 9, dtype=torch.int64)
                real = torch.ones(2, 9, dtype=torch.bool)
            try:
                for mask in (None, real):
                    x, cache = net.hidden_states(tokens, padding_mask=mask, validate=False)
                    x, cache = net.hidden_states(tokens[:, :1], cache=cache, validate=False)
            except (RuntimeError, NotImplementedError) as error:
                raise AssertionError(f"{case} looks at values on {device}: {error}") from error
        assert x.shape == (2, 1, net.config.d_model)


# --- one graph: properties of a module m ------------------------------------------------------


def short(m, name):
    """A tiny preset with every letter once, and the first of them a second time."""
    config = m.preset(name)
    letters = "".join(dict.fromkeys(config.pattern))
    return dataclasses.replace(config, pattern=letters + letters[0])


def as_one_graph(net, backend):
    """The compiled model, and a counter of the graphs that it was compiled to."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(net, fullgraph=True, backend=counter), counter


def losses(net, run, tokens):
    """Logits and gradients of a training step."""
    net.zero_grad()
    logits, cache = run(tokens, use_cache=False)
    assert cache is None
    (logits * normal(*logits.shape, seed=8)).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in net.parameters()])


def trains_as_one_graph(m, name):
    """Some through autograd too, which traces the backward pass."""
    backend = "aot_eager" if name in THROUGH_AUTOGRAD else "eager"
    torch.manual_seed(0)
    net, tokens = m.CausalLM(short(m, name)).double(), ids(2, 12)
    run, counter = as_one_graph(net, backend)
    try:
        results = losses(net, run, tokens), losses(net, net, tokens)
    except RuntimeError as error:  # of dynamo, or of the graph that it made
        raise AssertionError(f"{name} is no graph that trains: {error}") from error
    for got, want in zip(*results, strict=True):
        check(f"{name}, compiled: training", got, want)
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"


def decodes_as_one_graph(m, name):
    """A prompt and token by token; once lengths are known to vary, no token compiles anew."""
    backend = "aot_eager" if name == THROUGH_AUTOGRAD[0] else "eager"
    torch.manual_seed(0)
    net, tokens = m.CausalLM(short(m, name)).double(), ids(2, 12)
    run, counter = as_one_graph(net, backend)
    with torch.no_grad():
        want, _ = net(tokens)
        logits, cache = run(tokens[:, :7])
        parts, graphs = [logits], [counter.frame_count]
        for t in range(7, 12):
            logits, cache = run(tokens[:, t : t + 1], cache=cache)
            parts.append(logits)
            graphs.append(counter.frame_count)
            assert graphs[-1] <= 3, f"graphs after each call: {graphs}"
    check(f"{name}, compiled: prompt and tokens", torch.cat(parts, dim=1), want)
    assert graphs[0] == 1 and graphs[2] == graphs[-1], f"graphs after each call: {graphs}"


def test_a_padded_prompt_compiles():
    net, real = built(model, "SEIE"), rows("..#######", "#######..")
    run, counter = as_one_graph(net, "eager")
    with torch.no_grad():
        got, want = (f(ids(2, 9), padding_mask=real)[0][real] for f in (run, net))
    check("compiled with padding", got, want)
    assert counter.frame_count == 1


def exported(net, tokens, *, length=None, **kwargs):
    shapes = None
    if length is not None:
        shapes = dict(input_ids={1: length}, **dict.fromkeys(kwargs))
    return torch.export.export(net, (tokens,), kwargs, dynamic_shapes=shapes).module()


def test_a_model_is_exported():
    """For one length, with padding, and for a token after it."""
    torch.manual_seed(0)
    net, tokens = model.CausalLM(short(model, "cheems-tiny")).double().eval(), ids(2, 12)
    real = torch.arange(12).expand(2, -1) > torch.tensor([[2], [0]])
    with torch.no_grad():
        given = dict(padding_mask=real)
        got, want = (f(tokens, **given)[0] for f in (exported(net, tokens, **given), net))
        check("exported: a prompt", got[real], want[real])
        given, token = dict(cache=net(tokens)[1]), tokens[:, :1]
        got, want = (f(token, **given)[0] for f in (exported(net, token, **given), net))
        check("exported: the token after it", got, want)


def test_a_model_of_attention_is_exported_for_any_length():
    """With SSD a program holds for as many chunks as it was traced with: they are a loop."""
    torch.manual_seed(0)
    net = model.CausalLM(short(model, "llama-tiny")).double().eval()
    length = torch.export.Dim("length", min=2, max=512)
    program = exported(net, ids(2, 12), length=length, use_cache=False)
    for n in (12, 5, 70):
        got, want = (f(ids(2, n), use_cache=False)[0] for f in (program, net))
        check(f"exported: {n} tokens", got, want)


# --- the package has them ---------------------------------------------------------------------

HELD = titled(
    *itertools.product((layers_ask_nothing, the_door_asks_twice), (*TINY, *MODELS)),
    *itertools.product((layers_run_without_values,), ASKING_NOTHING),
    *itertools.product((trains_as_one_graph, decodes_as_one_graph), ASKING_NOTHING),
)


@pytest.mark.parametrize("has_property, case", HELD.values(), ids=HELD)
def test_the_model_has_the_property(has_property, case):
    ask(has_property, case)
