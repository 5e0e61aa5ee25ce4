"""One table of layers, one list of properties: every layer is asked everything that concerns it.

A row says how a layer is made, what defines it (definitions.py), and which questions make sense.
The properties are those of `cheems_ref.verify`, as a user would ask them of a layer of their own,
and agreement with the definition: in values, in gradients with respect to the input and to every
parameter, in one call or in several, with padding or without.
"""

import inspect
import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import definitions
import pytest
import torch
from properties import asks_nothing, held, normal, questions, rows, starts_alike
from torch import nn

from cheems_ref import attention, config, experts, mamba, model, ssd, state_space, verify
from cheems_ref.verify import check, must_differ

# What a layer is called with beside x: all that there is, its cache, or nothing.
SEQUENCE, CACHED, PLAIN = ("position_ids", "padding_mask", "cache"), ("cache",), ()
VOCABULARY = 19


class Layer(NamedTuple):
    """One row: make(**options), and its definition(parameters, x, positions, **options)."""

    make: Callable[..., nn.Module]
    definition: Callable
    options: dict
    width: int | None  # of x; None for token ids
    takes: tuple[str, ...] = SEQUENCE
    shift: str = "changes nothing"  # or "has no effect", "changes y"
    asks: int = 0  # questions to the device in one call
    shape: tuple[int, int] = (2, 7)  # of the rows that are compared with a definition by loops
    idle: tuple[str, ...] = ()  # parameters that choose one thing, and learn nothing from it

    def made(self, dtype=torch.float64):
        """With parameters away from where they start, so that nothing is zero, one or alike."""
        torch.manual_seed(0)
        layer = self.make(**self.options)
        with torch.no_grad():
            for i, (name, p) in enumerate(layer.named_parameters()):
                moved = name.endswith((".D", "D", "norm.weight"))
                p.add_(normal(*p.shape, seed=i) / 4) if moved else None
                if "mask." in name:
                    p.copy_(normal(*p.shape, seed=i))
                elif name == "embedding.weight":
                    p.mul_(10)
                elif name.endswith("dt_bias"):
                    p.add_(2)  # steps so large that tokens tell apart
                elif self.takes == PLAIN and name.endswith("weight"):
                    p.mul_(2)
        return layer.to(dtype)

    def tokens(self, b, length, seed=1, dtype=torch.float64):
        if self.width is None:
            generator = torch.Generator().manual_seed(seed)
            return torch.randint(VOCABULARY, (b, length), generator=generator)
        return normal(b, length, self.width, seed=seed, dtype=dtype)

    def call(self, layer, x, position_ids=None, padding_mask=None, cache=None):
        """y and the cache, or None, from positions that count tokens unless they are given."""
        if position_ids is None:
            position_ids = torch.arange(x.shape[1]).expand(x.shape[:2])
        given = dict(position_ids=position_ids, padding_mask=padding_mask, cache=cache)
        given = {name: t for name, t in given.items() if name in self.takes}
        y = layer(x, **given)
        return y if isinstance(y, tuple) else (y, None)

    def truth(self, layer, x):
        """y of each row, by the definition."""
        ids = torch.arange(x.shape[1]).expand(x.shape[:2])
        return self.definition(dict(layer.named_parameters()), x, ids, **self.options)


LAYERS = {}

# --- sequence mixers ---------------------------------------------------------------------------

SSD = dict(d_model=8, n_heads=4, n_groups=2, d_head=3, d_state=6, chunk_size=4)
LEAST = dict(d_model=8, n_heads=1, n_groups=1, d_head=1, d_state=1, d_conv=1, chunk_size=1)
for position, changes in {
    "rope": dict(rope_base=50.0),
    "conv": dict(d_conv=3),
    "decay": dict(d_state=5),
}.items():
    shift = "changes nothing" if position == "rope" else "has no effect"
    smallest = LEAST | dict(position=position, d_state=2 if position == "rope" else 1)
    row = partial(Layer, ssd.SSD, definitions.ssd_layer, width=8, shift=shift)
    LAYERS[f"SSD, {position}"] = row(SSD | dict(position=position) | changes)
    LAYERS[f"SSD, {position}, one of everything"] = row(smallest)
for backend in ("recurrent", "quadratic"):
    LAYERS[f"SSD, {backend}"] = Layer(
        ssd.SSD, definitions.ssd_layer, SSD | dict(backend=backend), width=8
    )
LAYERS["SSD, three heads to a group"] = Layer(
    ssd.SSD, definitions.ssd_layer, SSD | dict(n_heads=6, d_head=2), width=8
)

MASKS = {
    "": {},
    "gate": dict(mask="gate", max_positions=64),
    "rounded gate": dict(mask="gate", max_positions=64, hard=True),
    "content": dict(mask="content"),
    "three keys": dict(mask="content", k_keys=3),
}
INNER = {
    "QCAttn": {},
    "ssd": dict(inner="ssd", d_state=4),
    "retrieved": dict(inner="retrieved", n_values=5, k_values=2),
    "linear": dict(inner="linear"),
}
HEADS = {"g = 4": dict(n_heads=4), "g = 2": dict(n_heads=4, n_kv_heads=2), "h = 1": dict(n_heads=1)}
for (inner, values), (mask, masked) in itertools.product(INNER.items(), MASKS.items()):
    # One grouping for each combination, and every grouping for attention without a mask.
    groups = HEADS if inner == "QCAttn" or not mask else ["g = 2"]
    for heads in groups:
        LAYERS[", ".join(filter(None, (inner, mask, heads)))] = Layer(
            attention.QCAttn if inner == "QCAttn" else attention.InnerFuncAttn,
            definitions.attention_layer,
            dict(d_model=16, rope_base=50.0) | HEADS[heads] | values | masked,
            width=16,
            shift="changes y" if "gate" in mask else "changes nothing",
        )

SCAN = dict(d_model=6, d_state=4, d_conv=3, dt_rank=2)
SCANS = {
    "Mamba": SCAN,
    "Mamba, sequential": SCAN | dict(scan="sequential"),
    "Mamba, control": SCAN | dict(selective=False),
    "Mamba, one of everything": dict(d_model=1, d_state=1, d_conv=1, expand=1, dt_rank=1),
}
for name, options in SCANS.items():
    LAYERS[name] = Layer(
        mamba.Mamba, definitions.mamba_layer, options, width=options["d_model"], takes=CACHED
    )
for init in ("lin", "legs"):
    options = dict(d_model=4, d_state=6, init=init)
    LAYERS[f"S4D, {init}"] = Layer(
        state_space.S4D, definitions.s4d_layer, options, width=4, takes=PLAIN
    )

# --- state mixers --------------------------------------------------------------------------------

ROUTED = dict(d_model=6, d_ff=4, n_experts=5, k=2)
PEER = dict(d_model=6, n_experts=9, n_heads=3, k=4, d_query=4)
ONE = ROUTED | dict(n_experts=3, k=1)
PLAIN_LAYERS = {
    "MLP": (definitions.mlp, dict(d_model=6, d_ff=4)),
    "MLP, gated": (definitions.mlp, dict(d_model=6, d_ff=4, gated=True)),
    "DGLU": (definitions.dglu, dict(d_model=6, d_ff=4)),
    "DGLU, sigmoid": (definitions.dglu, dict(d_model=6, d_ff=4, gate="sigmoid")),
    "MoE": (definitions.moe, ROUTED),
    "MoE, renormalized": (definitions.moe, ROUTED | dict(renormalize=True)),
    "MoE, all experts": (definitions.moe, ROUTED | dict(k=5)),
    "MoE, one expert": (definitions.moe, ONE),
    "MoE, one expert, renormalized": (definitions.moe, ONE | dict(renormalize=True)),
    "SharedExpertMoE": (definitions.shared_expert_moe, ROUTED),
    "CohesiveMoE": (definitions.moe, ROUTED),
    "ExpansiveMoE": (definitions.expansive_moe, ROUTED),
    "PEER": (definitions.peer, PEER),
    "PEER, one head": (definitions.peer, PEER | dict(n_heads=1)),
    "PEER, all experts": (definitions.peer, PEER | dict(k=9)),
    "PEER, one expert": (definitions.peer, PEER | dict(k=1)),
    "CDMMoE": (definitions.cdmmoe, PEER | dict(d_ff=4)),
    "CDMMoE, wide": (definitions.cdmmoe, PEER | dict(d_ff=4, d_private=6)),
    "CDMMoE, one expert": (definitions.cdmmoe, PEER | dict(d_ff=4, k=1)),
    "CDMoE": (definitions.cdmoe, PEER | dict(d_ff=4)),
    "CDMoE, no residual": (definitions.cdmoe, PEER | dict(d_ff=4, residual=False)),
    "CDMoE, parallel": (definitions.cdmoe, PEER | dict(d_ff=4, form="parallel")),
}
IDLE = {
    "MoE, one expert, renormalized": ("router.weight",),
    "PEER, one expert": ("query_proj.weight", "keys"),
    "CDMMoE, one expert": ("retrieval.query_proj.weight", "retrieval.keys"),
}
for name, (definition, options) in PLAIN_LAYERS.items():
    LAYERS[name] = Layer(
        getattr(experts, name.split(",")[0]),
        definition,
        options,
        width=6,
        takes=PLAIN,
        asks=int("k" in options and "n_heads" not in options),
        shape=(2, 5),
        idle=IDLE.get(name, ()),
    )

# --- models: every letter, position, inner function and mask -------------------------------------

SIZES = dict(
    vocab_size=VOCABULARY, d_model=16, n_heads=4, n_groups=2, d_state=6, d_conv=3, rope_base=50.0,
    chunk_size=3, n_values=5, k_values=3, d_ff=12, n_experts=4, k_experts=2, n_neurons=16,
    k_neurons=3, n_retrieval_heads=2, d_query=6, norm_eps=1e-3,
)  # fmt: skip
MODELS = {
    "SEIE": {},
    "SHARA": dict(position="conv", d_head=6, n_kv_heads=2, tie_embeddings=False),
    "SDIX": dict(position="decay", inner="linear", mask="content", n_kv_heads=1),
    "SKIK": dict(inner="ssd", d_private=5),
    "IPAM": dict(mask="content", k_keys=3, n_kv_heads=2, tie_embeddings=False),
    "SGIC": dict(mask="gate", max_positions=64, inner="linear"),
}


def make_model(**options):
    return model.CausalLM(model.ModelConfig(**options))


for pattern, options in MODELS.items():
    LAYERS[pattern] = Layer(
        make_model,
        definitions.language_model,
        SIZES | dict(pattern=pattern) | options,
        width=None,
        takes=("padding_mask", "cache"),
        asks=2 + sum(pattern.count(letter) for letter in "RHCX"),
        shape=(2, 6),
    )

WITH_CACHE = {name: row for name, row in LAYERS.items() if "cache" in row.takes}
WITH_PADDING = {name: row for name, row in LAYERS.items() if "padding_mask" in row.takes}
ROUTING = {name: row for name, row in LAYERS.items() if "k" in row.options}


# --- the properties ------------------------------------------------------------------------------


@cache
def made(name):
    """A layer that no test changes."""
    return LAYERS[name].made()


def built(m, name, dtype=torch.float64, **changes):
    """The layer of a row, made of the classes of a module m."""
    row = LAYERS[name]
    row = row._replace(make=getattr(m, row.make.__name__), options=row.options | changes)
    return row.made(dtype)


def has(m, name, title):
    """That layer has the property of this table that a test asks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(globals(), "made", partial(built, m))
        globals()[f"test_{title}"](name)


def is_defined(m, name):
    has(m, name, "values_and_gradients_are_those_of_the_definition")


def each(layers):
    return pytest.mark.parametrize("name", layers)


def agree(title, y, want, named, idle=None):
    """Two results, and their gradients with respect to the named tensors: 0 for those in `idle`,
    and not 0 for the others, if it is given."""
    check(f"{title}: y", y, want, atol=1e-10)
    weights = normal(*y.shape, seed=8)
    grads = [
        torch.autograd.grad(
            (t * weights).sum(), [*named.values()], retain_graph=True, materialize_grads=True
        )
        for t in (y, want)
    ]
    for key, got, expected in zip(named, *grads, strict=True):
        if idle is not None:
            learns = (expected if key not in idle else got).any()
            assert learns == (key not in idle), f"{title}: gradient of {key}"
        check(f"{title}: gradient of {key}", got, expected, atol=1e-10)


def learnable(row, layer, x):
    """The input, where it takes a gradient, and every parameter, by name."""
    of_input = {"x": x.requires_grad_()} if row.width else {}
    return of_input | dict(layer.named_parameters())


@each(LAYERS)
def test_values_and_gradients_are_those_of_the_definition(name):
    row, layer = LAYERS[name], made(name)
    x = row.tokens(*row.shape)
    named = learnable(row, layer, x)
    agree(name, row.call(layer, x)[0], row.truth(layer, x), named, row.idle)


@each(LAYERS)
def test_is_causal(name):
    row = LAYERS[name]
    x = row.tokens(2, 11)
    if row.takes == PLAIN and not name.startswith("S4D"):  # no token sees another
        x = row.tokens(2, 6)
        for t in range(6):
            alone = row.call(made(name), x[:, t : t + 1])[0]
            check(f"token {t} alone", alone, row.call(made(name), x)[0][:, t : t + 1])
    else:
        verify.is_causal(made(name), x)


@each(LAYERS)
def test_rows_are_independent(name):
    verify.rows_are_independent(made(name), LAYERS[name].tokens(3, 9))


@each(WITH_CACHE)
def test_pieces_equal_one_pass(name):
    verify.pieces_equal_one_pass(made(name), LAYERS[name].tokens(2, 11))


@each(WITH_PADDING)
def test_padding_changes_nothing(name):
    verify.padding_changes_nothing(made(name), LAYERS[name].tokens(3, 9))


@each([name for name, row in LAYERS.items() if "position_ids" in row.takes])
def test_shift_of_positions(name):
    row = LAYERS[name]
    ask = partial(verify.shift_changes_nothing, made(name), row.tokens(2, 9))
    if row.shift == "has no effect":
        with pytest.raises(ValueError, match="positions do not change"):
            ask()
    elif row.shift == "changes y":
        with pytest.raises(verify.Refuted):
            ask(by=(3,))
    else:
        ask()


@each(LAYERS)
def test_every_parameter_learns(name):
    row = LAYERS[name]
    layer = row.made()
    for key in row.idle:
        layer.get_parameter(key).requires_grad_(False)
    verify.every_parameter_learns(layer, row.tokens(4, 8))


REAL = rows("##.#..#", ".#.##.#")


@each(WITH_PADDING)
def test_padded_rows_and_what_goes_on_from_them_are_the_definition_of_the_rows_alone(name):
    """Whatever stands in the padding, and whatever positions: values, gradients, and two more.

    In one call; and in two, each with padding of its own, after one without any.
    """
    row, layer = LAYERS[name], made(name)
    x, before, more = (row.tokens(2, n, seed=seed) for n, seed in ((7, 1), (2, 3), (2, 2)))
    named = learnable(row, layer, x)
    everything = torch.ones(2, 2).bool()
    for junk, position, late in ((math.nan, 10**9, False), (math.inf, -1, True)):
        padded = x.masked_fill(~REAL[..., None], junk) if row.width else x
        calls = [(padded, REAL)]
        if late:
            calls = [(before, None), (padded[:, :4], REAL[:, :4]), (padded[:, 4:], REAL[:, 4:])]
        # Token by token, since no call is told of the padding again.
        calls += [(more[:, :1], None), (more[:, 1:], None)]
        y, cache, start = [], None, 0
        for tokens, real in calls:
            seen = everything[:, : tokens.shape[1]] if real is None else real
            ids = (start + seen.cumsum(1) - 1).masked_fill(~seen, position)
            part, cache = row.call(layer, tokens, ids, real, cache)
            y.append(part.masked_fill(~seen[..., None], 0))
            start = start + seen.sum(1, keepdim=True)
        kept = torch.cat([everything, REAL, everything], dim=1)[:, 0 if late else 2 :]
        text = torch.cat([before, x, more], dim=1)[:, 0 if late else 2 :]
        want = [row.truth(layer, text[i, real][None])[0] for i, real in enumerate(kept)]
        agree(f"{name}, padded", torch.cat(y, dim=1)[kept], torch.cat(want), named)


@each(WITH_PADDING)
def test_a_row_of_padding_alone_leaves_no_trace(name):
    row, layer = LAYERS[name], made(name)
    x, more = row.tokens(2, 3), row.tokens(2, 4, seed=2)
    _, cache = row.call(layer, x, padding_mask=torch.zeros(2, 3).bool())
    check("after padding", row.call(layer, more, cache=cache)[0], row.call(layer, more)[0])


@each(WITH_CACHE)
def test_calls_that_hand_the_cache_on_learn_as_one(name):
    """Through the cache too, which is a value: no call writes into it, and it serves twice."""
    row, layer = LAYERS[name], made(name)
    x = row.tokens(2, 7)
    ids, named = torch.arange(7).expand(2, 7), learnable(row, layer, x)
    for cuts in ((5,), (1, 2, 6)):
        pieces, kept, cache = [], [], None
        for start, stop in itertools.pairwise((0, *cuts, 7)):
            piece = slice(start, stop)
            given = (x[:, piece], ids[:, piece], None, cache)
            (y, cache), (again, other) = row.call(layer, *given), row.call(layer, *given)
            check("a cache serves twice", again, y)
            for key, t in held(cache).items():
                check(f"a cache serves twice: {key}", held(other)[key], t)
            pieces.append(y)
            kept += [(key, t, t.detach().clone(), t._version) for key, t in held(cache).items()]
        for key, t, copy, version in kept:
            assert torch.equal(t, copy) and t._version == version, f"{key} is written to"
        whole, of_one = row.call(layer, x)
        agree(f"{name}, cut at {cuts}", torch.cat(pieces, dim=1), whole, named)
        assert held(cache).keys() == held(of_one).keys()
        for key, t in held(of_one).items():
            check(f"{key}, cut at {cuts}", held(cache)[key], t)


@each(LAYERS)
def test_nothing_in_gives_nothing_out_and_one_token_is_a_sequence(name):
    row, layer = LAYERS[name], made(name)
    x = row.tokens(2, 4)
    y, _ = row.call(layer, x)
    for b, length in ((2, 0), (0, 3), (0, 0)):
        nothing, after = row.call(layer, x[:b, :length])
        assert nothing.shape == (b, length, *y.shape[2:])
        nothing.sum().backward()
        layer.zero_grad()
        if "cache" in row.takes and b:
            check("nothing before", row.call(layer, x, cache=after)[0], y)
    one = x[:, :1]
    with torch.no_grad():  # a single token may go another way where no gradient is asked for
        stepped, _ = row.call(layer, one)
    want = row.truth(layer, one)
    check("one token", row.call(layer, one)[0], want, atol=1e-10)
    check("one token, without a gradient", stepped, want.detach(), atol=1e-10)


CHOICES = {"k", "k_keys", "hard", "k_values"}  # where rounding chooses another expert, key or row


@each(LAYERS)
def test_narrow_dtypes(name):
    """Up to rounding, a layer is that with the same weights in float64; its state is wide.

    In sixteen bits unless it chooses: there it stays finite.
    """
    row = LAYERS[name]
    for dtype in (torch.float32, torch.bfloat16):
        if name.startswith("S4D") and dtype == torch.bfloat16:
            continue
        layer, x = row.made(dtype), row.tokens(2, 6, dtype=dtype)
        y, cache = row.call(layer, x)
        y.float().square().sum().backward()
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        assert y.dtype == dtype and y.isfinite().all()
        assert all(g.dtype == dtype and g.isfinite().all() for g in grads)
        for key, t in held(cache).items():
            assert not t.is_floating_point() or t.dtype in (dtype, torch.float32), key
            assert "state" not in key or t.dtype == torch.float32, key
        if dtype == torch.float32 or (row.width and not row.options.keys() & CHOICES):
            want, _ = row.call(layer.double(), x.double() if row.width else x)
            check(f"{dtype} = float64", y, want.to(dtype), tol={torch.float32: 1e-4}.get(dtype))


@each(LAYERS)
def test_made_without_memory_it_starts_as_one_made_directly(name):
    row = LAYERS[name]
    starts_alike(partial(row.make, **row.options))


@each(LAYERS)
def test_questions_to_the_device(name):
    """None, but that a mixture is told how many tokens each expert has, and a model checks ids."""
    row, layer = LAYERS[name], made(name)
    x = row.tokens(2, 5)
    with questions() as asked:
        y, _ = row.call(layer, x)
        y.sum().backward()
    layer.zero_grad()
    assert len(asked) == row.asks, asked
    if "cache" in row.takes and not row.asks:
        asks_nothing(
            layer,
            x,
            REAL[:, :5] if "padding_mask" in row.takes else None,
            call=partial(of_mixer, row),
        )


def of_mixer(row, layer, x, real, cache, start):
    ids = start + torch.arange(x.shape[1]).expand(x.shape[:2])
    return row.call(layer, x, ids, real, cache)


@each(ROUTING)
def test_the_route_is_the_one_that_y_takes(name):
    """Gates descend, and stand where the definition has them."""
    row, layer = LAYERS[name], made(name)
    x, p = row.tokens(2, 5), dict(layer.named_parameters())
    gates, indices = layer.route(x)
    if "n_heads" not in row.options:
        want = definitions.routed_gates(p, x, **row.options)
    elif name.startswith("CDMMoE"):
        z = definitions.mlp(definitions.part(p, "shared."), x, gated=True)
        z = z @ p["private_proj.weight"].T
        want = definitions.retrieved_gates(definitions.part(p, "retrieval."), z, **row.options)
    else:
        inside = name.startswith("CDMoE")
        z = (
            x
            if "parallel" in name or not inside
            else definitions.mlp(definitions.part(p, "shared."), x)
        )
        want = definitions.retrieved_gates(
            definitions.part(p, "experts.") if inside else p, z, **row.options
        )
    check("gates", torch.zeros_like(want).scatter(-1, indices, gates), want, atol=1e-10)
    assert (gates.diff() <= 0).all() and (indices.sort(dim=-1).values.diff() > 0).all()


def test_every_layer_type_is_in_a_model():
    assert {*"".join(MODELS)} == config.LAYERS.keys() == definitions.OF_LETTER.keys()


@each([name for name, row in LAYERS.items() if row.width])
def test_an_option_that_is_dropped_would_be_seen(name):
    """The definition without one of the row's options is another function, or none."""
    row, layer = LAYERS[name], made(name)
    x, parameters = row.tokens(*row.shape), inspect.signature(row.definition).parameters
    truth = row.truth(layer, x)
    for option in parameters.keys() & row.options.keys():
        if row.options[option] != parameters[option].default:
            fewer = {key: value for key, value in row.options.items() if key != option}
            try:
                other = row._replace(options=fewer).truth(layer, x)
            except (TypeError, KeyError, RuntimeError):
                continue
            must_differ(f"without {option}", other, truth, at_least=1e-6)
