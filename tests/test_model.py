"""The stack: padding together with caches, tables of angles, starts, sixteen bits.

The properties are functions of a module m and of a case: planted/ hands them copies with a mistake.
"""

import itertools
from functools import partial

import pytest
import test_layers
import torch
import torch.nn.functional as F
import whole as model
from hypothesis import given
from hypothesis import strategies as st
from models import PADDING, ask, built, few, ids, options, titled
from properties import angles_made, gradients, held, starts_alike

from cheems_ref import attention, config, experts, retrieval
from cheems_ref.check import INTEGERS
from cheems_ref.ssd import SSD
from cheems_ref.verify import check

# --- the stack: properties of a module m and of a case ----------------------------------------


def is_the_definition(m, case):
    """The model of a module m is what the row of test_layers says."""
    row = test_layers.LAYERS[case]
    row = row._replace(make=lambda **given: m.CausalLM(m.ModelConfig(**given)))
    net, tokens = row.made(), row.tokens(*row.shape)
    check(f"{case} = its definition", row.call(net, tokens)[0], row.truth(net, tokens))


def padding_and_cuts_change_nothing(m, case, real=PADDING["middle"], cuts=(2, 5)):
    """Calls that hand the cache on, padded, and two tokens more: each row is what it is alone.

    No call writes into a cache.
    """
    net, length = built(m, case), real.shape[1]
    real = torch.cat([real, torch.ones(2, 2).bool()], dim=1)
    tokens, logits, cache, kept = ids(2, length + 2), [], None, []
    for start, stop in itertools.pairwise((0, *cuts, length, length + 1, length + 2)):
        mask = real[:, start:stop]
        mask = None if mask.all() else mask
        y, cache = net(tokens[:, start:stop], padding_mask=mask, cache=cache)
        logits.append(y)
        kept += [(name, t, t.clone()) for name, t in held(cache).items()]
        assert torch.equal(cache.n_tokens, real[:, :stop].sum(1)), "tokens are miscounted"
    for name, t, copy in kept:
        assert torch.equal(t, copy), f"{name} is written to"
    got = torch.cat(logits, dim=1)[real]
    want = torch.cat([net(tokens[i : i + 1, row])[0][0] for i, row in enumerate(real)])
    check(f"{case}, padded and in pieces: logits", got, want)
    grads = (gradients(t, net.parameters()) for t in (got, want))
    check(f"{case}, padded and in pieces: gradients", *grads)


@few
@given(
    case=st.fixed_dictionaries(
        dict(
            pattern=st.text(sorted(model.LAYERS), min_size=1, max_size=5)
            .flatmap(lambda text: st.sampled_from("SAI").map(lambda letter: text + letter))
            .flatmap(st.permutations)
            .map("".join),
            position=st.sampled_from(["rope", "conv", "decay"]),
            inner=st.sampled_from(["ssd", "retrieved", "linear"]),
            n_kv_heads=st.sampled_from([None, 1, 2]),
            tie_embeddings=st.booleans(),
        ),
        optional=dict(mask=st.sampled_from(["gate", "content"]), max_positions=st.just(20)),
    ).filter(lambda case: case.get("mask") != "gate" or "max_positions" in case),
    real=st.integers(1, 7).flatmap(
        lambda n: st.lists(
            st.lists(st.booleans(), min_size=n, max_size=n), min_size=2, max_size=2
        ).map(torch.tensor)
    ),
    cut=st.integers(0, 7),
)
def test_any_pattern_any_padding_and_any_cut(case, real, cut):
    padding_and_cuts_change_nothing(model, case, real, (min(cut, real.shape[1]),))


def no_cache_leaves_where_none_is_asked_for(m, case):
    """Neither the model nor a block hands one on; logits and gradients are the same."""
    net, tokens, handed = built(m, case), ids(2, 7), []
    for block in net.blocks:
        block.register_forward_hook(lambda block, args, out: handed.append(out[1]))
    want, cache = net(tokens)
    handed.clear()
    got, none = net(tokens, use_cache=False)
    assert none is None and handed == [None] * len(net.blocks), "a cache is handed on"
    check(f"{case}, without a cache: logits", got, want)
    grads = (gradients(t, net.parameters()) for t in (got, want))
    check(f"{case}, without a cache: gradients", *grads)
    more, none = net(tokens[:, :1], cache=cache, use_cache=False)
    assert none is None
    check(f"{case}, none left: logits", more, net(tokens[:, :1], cache=cache)[0])


def angles_are_made_once(m, case, n_widths):
    """In a call, for each width that is turned, and not in each layer."""
    net, real = built(m, case), PADDING["left"]
    _, cache = net(ids(2, 7), padding_mask=real)
    for call in (
        dict(input_ids=ids(2, 7)),
        dict(input_ids=ids(2, 7), padding_mask=real),
        dict(input_ids=ids(2, 1), cache=cache),
    ):
        made = angles_made(partial(net.hidden_states, **call))
        assert made == n_widths, f"{made} tables of cosines, not {n_widths}"


def layers_turn_by_their_own(m, case):
    """By the base of each layer, and by the positions that each is called with."""
    net, tokens = built(m, case), ids(2, 7)
    net.blocks[1].layer.rope_base = 3.0
    net.blocks[2].register_forward_pre_hook(lambda _, given: (given[0], 3 * given[1]))
    x = net.embedding(tokens)
    for block in net.blocks:
        x, _ = block(x, torch.arange(7).expand(2, -1))
    check(f"{case} = its blocks, one by one", net(tokens)[0], net.logits(net.norm(x)))


def starts_as_one_made_directly(m, case):
    """Also when it was made on the meta device and given memory later."""
    starts_alike(lambda: m.CausalLM(m.ModelConfig(**options(case))))


def fresh_weights_are_those_published(m, name):
    """Embeddings: normal, 0.02. Maps: torch's uniform. A and dt: Mamba-2's; norms and D: ones."""
    torch.manual_seed(3)
    net = m.CausalLM(m.preset(name))
    assert abs(net.embedding.weight.std() / 0.02 - 1) < 0.02
    assert abs(net.embedding.weight.mean()) < 1e-3
    for path, layer in net.named_modules():
        if isinstance(layer, torch.nn.Linear):
            bound, w = layer.in_features**-0.5, layer.weight
            assert layer.bias is None and w.abs().max() <= bound, path
            assert w.numel() < 1000 or abs(w.std() / (bound / 3**0.5) - 1) < 0.1, path
        elif isinstance(layer, torch.nn.RMSNorm):
            assert torch.equal(layer.weight, torch.ones(64)), path
    of_ssd = [layer for layer in net.modules() if isinstance(layer, SSD)]
    A = torch.cat([layer.A_log.exp() for layer in of_ssd])
    dt = torch.cat([F.softplus(layer.dt_bias) for layer in of_ssd])
    assert 1 <= A.min() < 5 and 12 < A.max() <= 16
    assert 1e-3 * 0.999 <= dt.min() < 1e-2 < dt.max() <= 1e-1 * 1.001
    assert all(torch.equal(layer.D, torch.ones(4)) for layer in of_ssd)


def layers_are_handed_their_options(m):
    """Those that change the cost and not the result."""
    net = built(m, "SEIE", chunk_size=5, backend="quadratic")
    assert (net.blocks[0].layer.chunk_size, net.blocks[0].layer.backend) == (5, "quadratic")


# --- the model has them -----------------------------------------------------------------------

HELD = titled(
    (layers_are_handed_their_options, None),
    (no_cache_leaves_where_none_is_asked_for, "SEIE"),
    (no_cache_leaves_where_none_is_asked_for, "IPAM"),
    # How many widths are turned: of d_state, of heads of attention.
    (partial(angles_are_made_once, n_widths=2), dict(pattern="SSAAIMI", inner="ssd")),
    (partial(angles_are_made_once, n_widths=1), dict(pattern="SIAS", d_state=4, inner="ssd")),
    (partial(angles_are_made_once, n_widths=0), dict(pattern="SSM", position="conv")),
    (layers_turn_by_their_own, dict(pattern="AAAM")),
    (layers_turn_by_their_own, dict(pattern="SSSM")),
    (fresh_weights_are_those_published, "cheems-tiny"),
)


@pytest.mark.parametrize("has_property, case", HELD.values(), ids=HELD)
def test_the_model_has_the_property(has_property, case):
    ask(has_property, case)


@pytest.mark.parametrize("position", ["rope", "conv"])
def test_a_sixteen_bit_model_without_choices_is_as_exact_as_its_numbers(position):
    case = dict(pattern="SMAGID", position=position, inner="ssd")
    wide, narrow = (built(model, case, dtype) for dtype in (torch.float32, torch.bfloat16))
    check("bfloat16 = float32", narrow(ids(2, 7))[0].float(), wide(ids(2, 7))[0], tol=0.04)
    assert model.generate(narrow, ids(2, 7), 3, padding_mask=PADDING["left"]).shape == (2, 3)


def test_ids_of_any_integer_dtype_are_taken():
    net, greedy = built(model, "SEIE"), model.Sampling(temperature=0)
    want = net(ids(2, 5))[0], model.generate(net, ids(2, 5), 4, greedy)
    for dtype in INTEGERS:
        given = ids(2, 5).to(dtype)
        assert isinstance(given, model.Ids)
        check(f"ids in {dtype}: logits", net(given)[0], want[0])
        assert torch.equal(model.generate(net, given, 4, greedy), want[1])


# --- bad input: caches of other models, more tokens than positions ------------------------------


def called(case="SEIE", **changes):
    return built(model, case)(**dict(input_ids=ids(2, 5)) | changes)


def decoded(case, other, length=5, padding_mask=None, **changes):
    """One more token for a model of one kind, with the cache of another."""
    _, cache = built(model, other, **changes)(ids(2, length), padding_mask=padding_mask)
    return built(model, case)(ids(2, 1), cache=cache)


def of_22(*counts):
    """A padding mask: of 22 tokens in each row so many are real."""
    return torch.arange(22) >= 22 - torch.tensor(counts)[:, None]


FULL = "input_ids needs 21 positions, but mask='gate' has max_positions = 20"
BAD_CALLS = [
    (called, dict(cache=called(input_ids=ids(3, 2))[1]), r"cache.n_tokens must be .* \(3,\)"),
    (decoded, dict(case="SEIE", other="SKIK"), "pattern: 'SKIK', this model's is 'SEIE'"),
    (decoded, dict(case="SEIE", other="SEIE", d_state=8), r"\(2, 4, 4, 8\)"),
    (decoded, dict(case="SEIE", other="SEIE", inner="ssd"), "cache"),
    (decoded, dict(case="SEIE", other="SEIE", position="conv"), "cache"),
    (decoded, dict(case="IEAE", other="IEAE", n_kv_heads=4), "cache"),
    (called, dict(case="IDSP", input_ids=ids(2, 21)), FULL),
    (called, dict(case="IDSP", input_ids=ids(2, 22), padding_mask=of_22(20, 21)), FULL),
    (decoded, dict(case="IDSP", other="IDSP", length=22, padding_mask=of_22(20, 19)), FULL),
]


@pytest.mark.usefixtures("unchecked")
def test_caches_of_other_models_and_too_many_tokens_are_refused():
    for function, arguments, message in BAD_CALLS:
        with pytest.raises(ValueError, match=message):
            function(**arguments)


# --- modules are called, and choices are exact ------------------------------------------------

EVERY_LETTER = [(letter, {}) for letter in config.LAYERS]
EVERY_LETTER += [("I", dict(inner="linear", mask="content")), ("I", dict(inner="ssd"))]
EVERY_LETTER += [("I", dict(mask="gate", max_positions=20)), ("S", dict(position="conv"))]


@pytest.mark.parametrize("letter, changes", EVERY_LETTER, ids=str)
def test_every_module_with_parameters_is_called(letter, changes):
    """Hooks, adapters, offloading and quantisation work on calls: none would see a weight read."""
    for tied in (True, False):
        case = dict(pattern="S" + letter, tie_embeddings=tied) | changes
        net, called = built(model, case), set()
        for name, module in net.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_hook(lambda *_, name=name, called=called: called.add(name))
        x, _ = net.hidden_states(ids(2, 7))
        called.discard("embedding")  # the table is called once more for the logits
        net.logits(x)
        holders = {n.rpartition(".")[0] for n, _ in net.named_parameters()}
        if not tied:
            holders -= {"embedding"}
        assert called == holders, f"not called: {holders - called}"


class Doubled(torch.nn.Module):
    """An adapter around a layer, as LoRA's: its result is that of the layer and as much again."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


def test_an_adapter_on_the_head_has_an_effect():
    net = built(model, dict(pattern="SM", tie_embeddings=False))
    want = 2 * net(ids(2, 7))[0]
    net.lm_head = Doubled(net.lm_head)
    check("logits of a doubled head", net(ids(2, 7))[0], want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.skipif(torch.backends.quantized.engine == "none", reason="no int8 on this CPU")
@pytest.mark.parametrize("letter, changes", EVERY_LETTER, ids=str)
def test_a_model_is_quantised_to_eight_bits(letter, changes):
    case = dict(pattern="S" + letter, tie_embeddings=False) | changes
    net = built(model, case, torch.float32)
    small = torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear}, torch.qint8)
    with torch.no_grad():
        got, want = small(ids(2, 7))[0], net(ids(2, 7))[0]
    assert got.isfinite().all() and not torch.equal(got, want)
    assert (got - want).norm() < 0.5 * want.norm()


def queries_of(layer, run):
    """The queries that a layer makes, in its own sixteen bits, and the result of the run."""
    made = []
    hook = layer.query_proj.register_forward_hook(lambda module, inputs, y: made.append(y))
    result = run()
    hook.remove()
    return made[0].double(), result


def none_is_below_the_best(exact, indices, title):
    """The share of tokens that take a choice whose exact score is below their k-th best: none."""
    k = indices.shape[-1]
    least = exact.topk(k, dim=-1).values[..., -1:] - 1e-5 * exact.abs().max()
    share = (exact.gather(-1, indices) < least).any(-1).double().mean().item()
    assert share == 0, f"{title}: {share:.2%} of the tokens have another set"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_sixteen_bit_models_choose_as_exactly_as_their_numbers_allow(dtype):
    torch.manual_seed(0)
    x = torch.randn(8, 128, 32).to(dtype)
    router = experts.MoE(32, 8, n_experts=64, k=6).to(dtype)
    exact = x.double() @ router.router.weight.double().T
    none_is_below_the_best(exact, router.route(x)[1], "router")
    peer = retrieval.PEER(32, n_experts=1024, n_heads=2, k=8, d_query=16).to(dtype)
    queries, (_, indices) = queries_of(peer, lambda: peer.route(x))
    queries = queries.unflatten(-1, (2, 2, -1))
    halves = torch.einsum("blhzm,hzrm->zblhr", queries, peer.keys.double())
    sums = (halves[0][..., :, None] + halves[1][..., None, :]).flatten(-2)
    none_is_below_the_best(sums, indices, "product keys")
    table = attention.RetrievedValues(32, n_heads=2, n_values=64, k_values=4).to(dtype)
    queries, weights = queries_of(table, lambda: table.weights(x))
    exact = torch.einsum("blhm,hrm->blhr", queries.unflatten(-1, (2, -1)), table.keys.double())
    none_is_below_the_best(exact, weights.topk(4, dim=-1).indices, "rows of values")
    mask, v = attention.ContentMask(32, 4).to(dtype), x.unflatten(-1, (4, 8))
    wide = attention.ContentMask(32, 4).double()
    wide.load_state_dict(mask.state_dict())
    places = torch.arange(128).expand(8, -1)
    check("content mask", mask(v, places).double(), wide(v.double(), places), tol=1e-5)
    gate = attention.GateMask(1, 2, hard=True).to(dtype)
    gate.logit.copy_(torch.tensor([[-2e-4, 2e-4]]))
    bias = gate(v[:1, :2], places[:1, :2])
    kept = gate.keeps(bias, torch.ones(2, 2).bool())
    assert kept[0, 0].tolist() == [[False, True]] * 2, "a gate below one half is kept"
