"""The wrapper for `transformers`: the package's own numbers, the library's conveniences."""

import copy
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
import whole as model
from models import MODELS, PADDING, SIZES, built, ids, options, refused
from planting import asked
from properties import angles_made, gradients
from safetensors import SafetensorError
from training import a_text, trained
from transformers import DynamicCache

from cheems_lab import hub, training
from cheems_lab.checkpoint import CheckpointError
from cheems_ref import text
from cheems_ref.model import Sampling, generate
from cheems_ref.verify import check, must_differ

ROOT = Path(__file__).parents[1]
transformers.utils.logging.disable_progress_bar()

# Every kind of cache, of mask, of head; alone and together.
STATES, ATTENTION = dict(pattern="SESE"), dict(pattern="AMAM", n_kv_heads=2)
GROUPS = dict(pattern="IEAE", inner="linear", n_kv_heads=2, mask="content")
CASES = ("SEIE", "SHSRAH", "SDICAX", "SKIK", "IPAM", "IRIG", STATES, ATTENTION, GROUPS)
FEW = ("SEIE", "SKIK", STATES, ATTENTION)
GREEDY = dict(do_sample=False, max_new_tokens=6)
TOLD = dict(return_dict_in_generate=True, **GREEDY)


def both(m, case, **changes):
    """A model of this package, and the same for the library."""
    net = built(model, case, **changes)
    return net, m.from_causal_lm(net)


def numbers(net):
    return {name: t.clone() for name, t in net.state_dict().items()}


def same(got, want):
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    for name, t in want.items():
        assert got[name].dtype == t.dtype and torch.equal(got[name], t), f"{name} differs"


def test_models_of_these_tests_cover_what_the_hub_tells_apart():
    seen = [model.ModelConfig(**options(case)) for case in CASES]
    kept = {kind for c in seen for kind in hub.CheemsConfig.from_model_config(c).layer_types}
    assert kept == {"linear_attention", "full_attention", "hybrid", "moe"}
    assert {c.position for c in seen if "S" in c.pattern} == {"rope", "conv", "decay"}
    assert {c.mask for c in seen if "I" in c.pattern} == {"gate", "content", None}
    assert {c.tie_embeddings for c in seen} == {True, False}


# --- one pass ---------------------------------------------------------------------------------


def computes_what_the_package_computes(m, case):
    """Logits, hidden states and gradients; padded on either side."""
    net, wrapped = both(m, case)
    tokens = ids(2, 7)
    for real in (None, *PADDING.values()):
        mask = None if real is None else real.long()
        want, _ = net(tokens, padding_mask=real)
        out = wrapped(tokens, attention_mask=mask, output_hidden_states=True)
        check(f"{case}: logits", out.logits, want)
        check(f"{case}, no cache: logits", wrapped(tokens, mask, use_cache=False).logits, want)
        hidden = net.hidden_states(tokens, padding_mask=real)[0]
        check(f"{case}: hidden states", out.hidden_states[-1], hidden)
        assert len(out.hidden_states) == len(net.blocks) + 1
        got = gradients(out.logits, wrapped.parameters())
        check(f"{case}: gradients", got, gradients(want, ordered(net, wrapped)))
    check(f"{case}: ids in uint8", wrapped(tokens.to(torch.uint8)).logits, net(tokens)[0])
    embedded = wrapped(inputs_embeds=wrapped.get_input_embeddings()(tokens))
    check(f"{case}: embedded ids", embedded.logits, net(tokens)[0])


def ordered(net, wrapped):
    """The parameters of a CausalLM in the order of its wrapper's."""
    mine = dict(net.named_parameters())
    return [mine[name.removeprefix("model.")] for name, _ in wrapped.named_parameters()]


def keeps_the_logits_that_are_asked_for(m):
    _, wrapped = both(m, "SEIE")
    want = wrapped(ids(2, 7)).logits
    for kept, part in ((1, want[:, -1:]), (3, want[:, -3:]), (0, want)):
        check(f"the last {kept}", wrapped(ids(2, 7), logits_to_keep=kept).logits, part)
    places = torch.tensor([0, 5])
    got = wrapped(ids(2, 7), logits_to_keep=places).logits
    check("chosen places", got, want[:, places])


def the_loss_is_that_of_the_next_token(m):
    _, wrapped = both(m, "SEIE")
    labels = ids(2, 7).clone()
    labels[0, 3] = -100
    out = wrapped(ids(2, 7), labels=labels)
    want = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    check("loss = mean of the next tokens'", out.loss.double(), want, tol=1e-6)
    summed = wrapped(ids(2, 7), labels=labels, num_items_in_batch=4).loss
    check("loss over a larger batch", summed.double(), want * 11 / 4, tol=1e-6)
    assert out.to_tuple()[0] is out.loss
    assert isinstance(wrapped(ids(2, 7), return_dict=False), tuple)


def positions_given_are_taken(m):
    _, wrapped = both(m, "SEIE")
    want = wrapped(ids(2, 5)).logits
    shifted = torch.arange(5)[None] + 7
    check("shifted alike", wrapped(ids(2, 5), position_ids=shifted).logits, want)
    stretched = wrapped(ids(2, 5), position_ids=3 * torch.arange(5)[None]).logits
    must_differ("stretched", stretched, want)


def angles_are_made_once(m):
    """In a call, for each width that is turned, and not in each layer."""
    _, wrapped = both(m, dict(pattern="SSAAM"))
    for mask in (None, PADDING["left"].long()):
        made = angles_made(lambda mask=mask: wrapped(ids(2, 7), mask))
        assert made == 2, f"{made} tables of cosines"


# --- several calls ----------------------------------------------------------------------------


def calls_join_up(m, case, cuts=(3, 5, 6), make=None):
    """A prompt, the rest and single tokens, through the library's cache, are one pass."""
    net, wrapped = both(m, case)
    tokens = ids(2, 7)
    for real in (None, *PADDING.values()):
        seen = torch.ones(2, 7).bool() if real is None else real
        want, _ = net(tokens, padding_mask=real)
        cache = None if make is None else make(wrapped.config)
        parts, first = [], cache
        for start, stop in itertools.pairwise((0, *cuts, 7)):
            mask = None if real is None else real[:, :stop].long()
            out = wrapped(tokens[:, start:stop], mask, past_key_values=cache)
            parts, cache = [*parts, out.logits.detach()], out.past_key_values
            assert cache.get_seq_length() == stop and first in (None, cache)
            assert isinstance(cache, DynamicCache)
        check(f"{case}: several calls = one", torch.cat(parts, 1)[seen], want[seen].detach())


def no_cache_is_written_where_none_is_asked_for(m, case):
    _, wrapped = both(m, case)
    tokens = ids(2, 7)
    out = wrapped(tokens, use_cache=False)
    assert out.past_key_values is None
    cache = wrapped(tokens[:, :6]).past_key_values
    for _ in range(2):  # the second finds what the first has found
        again = wrapped(tokens[:, 6:], past_key_values=cache, use_cache=False)
        check(f"{case}: only read", again.logits[:, 0], out.logits[:, 6])
        assert cache.get_seq_length() == 6 and again.past_key_values is None


def a_cache_is_copied_reset_and_reordered(m, case):
    _, wrapped = both(m, case)
    tokens = ids(3, 7)
    with torch.no_grad():
        want = wrapped(tokens).logits
        cache = wrapped(tokens[:, :5]).past_key_values
        assert not cache.is_compileable, "generate() makes masks of its own, and compiles"
        other = copy.deepcopy(cache)
        order = torch.tensor([2, 0, 0])
        other.reorder_cache(order)
        got = wrapped(tokens[order, 5:], past_key_values=other).logits
        check(f"{case}: reordered", got, want[order, 5:])
        got = wrapped(tokens[:, 5:], past_key_values=cache).logits
        check(f"{case}: the one that was copied", got, want[:, 5:])
        cache.reset()
        assert cache.get_seq_length() == 0
        check(f"{case}: anew", wrapped(tokens, past_key_values=cache).logits, want)


def states_cannot_be_cropped(m):
    for case in ("SEIE", "SKIK", STATES):
        cache = both(m, case)[1](ids(2, 5)).past_key_values
        refused(ValueError, "cannot forget 2 tokens", cache.crop, -2)
    _, wrapped = both(m, ATTENTION)
    tokens, cache = ids(2, 7), wrapped(ids(2, 7)).past_key_values
    cache.crop(-2)
    got = wrapped(tokens[:, 5:], past_key_values=cache).logits
    check("keys can", got, wrapped(tokens).logits[:, 5:])


# --- generate() -------------------------------------------------------------------------------


def writes_what_the_package_writes(m, case):
    """Greedily: the package's generate, the argmax of one pass; with padding, and without cache."""
    net, wrapped = both(m, case)
    for real in (None, PADDING["left"]):
        mask = None if real is None else real.long()
        out = wrapped.generate(ids(2, 7), attention_mask=mask, output_logits=True, **TOLD)
        got = out.sequences[:, 7:]
        want = generate(net, ids(2, 7), 6, Sampling(temperature=0), padding_mask=real)
        assert torch.equal(got, want), f"{case}: {got.tolist()} for {want.tolist()}"
        uncached = wrapped.generate(ids(2, 7), attention_mask=mask, use_cache=False, **GREEDY)
        assert torch.equal(uncached[:, 7:], want)
        seen = None if real is None else torch.cat([real, torch.ones(2, 6).bool()], 1)
        logits = net(out.sequences, padding_mask=seen)[0][:, 6:-1]
        assert torch.equal(logits.argmax(-1), got)
        # which generate() keeps in float32
        check(f"{case}: logits", torch.stack(out.logits, 1).double(), logits, tol=1e-6)


def it_goes_on_from_a_cache(m, case):
    """Of an earlier text, with more after it; the cache is the one that was handed in."""
    _, wrapped = both(m, case)
    first = wrapped.generate(ids(2, 5), cache_implementation="dynamic", **TOLD)
    cache, read = first.past_key_values, []
    assert cache.get_seq_length() == 10  # the last token is written, and not read
    hook = wrapped.model.blocks[0].register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].shape[1])
    )
    more = torch.cat([first.sequences, ids(2, 3, seed=2)], 1)
    got = wrapped.generate(more, past_key_values=cache, **TOLD)
    hook.remove()
    assert got.past_key_values is cache and read == [4, 1, 1, 1, 1, 1], f"{read} tokens are read"
    assert torch.equal(got.sequences, wrapped.generate(more, **GREEDY))


def beams_are_those_without_a_cache(m, case):
    """The same texts, and the same scores."""
    _, wrapped = both(m, case)
    options = TOLD | dict(num_beams=4, num_return_sequences=2, output_scores=True)
    options |= dict(attention_mask=PADDING["left"].long())
    got = wrapped.generate(ids(2, 7), **options)
    want = wrapped.generate(ids(2, 7), **options, use_cache=False)
    assert got.sequences.shape == (4, 13) and torch.equal(got.sequences, want.sequences)
    scores = (out.sequences_scores.double() for out in (got, want))
    check(f"{case}: scores of beams", *scores, tol=1e-6)
    must_differ("two beams", got.sequences[0].double(), got.sequences[1].double())


def samples_are_those_without_a_cache(m, case):
    """Of one seed; several of each row; and each row by itself."""
    _, wrapped = both(m, case)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        options = GREEDY | dict(do_sample=True, top_k=0, num_return_sequences=3)
        drawn.append(wrapped.generate(ids(2, 7), **options, use_cache=use_cache))
    assert drawn[0].shape == (6, 13) and torch.equal(*drawn)
    assert len({tuple(row) for row in drawn[0].tolist()}) > 2, "all rows are alike"


def it_stops_where_it_is_told(m):
    """Each row by itself, at an id, by a criterion or at a letter; padding follows."""
    _, wrapped = both(m, "SEIE", vocab_size=256)
    free = wrapped.generate(ids(2, 5), **GREEDY)
    one, other = free[0, 6], free[1, 7]
    assert not {int(one), int(other)} & {*free[0, 5:6].tolist(), *free[1, 5:7].tolist()}
    assert one < 128 and one not in free[1], "no letter that the first row alone writes"

    def stops(*lengths, **told):
        want = free.clone()
        for row, n in zip(want, lengths, strict=True):
            row[5 + n :] = 255
        got = wrapped.generate(ids(2, 5), pad_token_id=255, **GREEDY | told)
        assert got.tolist() == want[:, : 5 + max(lengths)].tolist(), f"{[*told]}: {got.tolist()}"

    def criterion(seen, scores, **_):  # which says every time which rows are at their end
        return (seen[:, 5:] == one).any(1) | (seen[:, 5:] == other).any(1)

    stops(2, 3, eos_token_id=[int(one), int(other)])
    padded = dict(eos_token_id=254)  # only where there is such an id does padding follow
    stops(2, 3, stopping_criteria=[criterion], **padded)
    stops(2, 6, stop_strings=[chr(one)], tokenizer=m.byte_tokenizer(), **padded)


def tokens_are_drafted_only_without_states(m):
    """Assisted decoding takes tokens back, which a cache with states cannot do."""
    _, wrapped = both(m, ATTENTION)
    want = wrapped.generate(ids(1, 7), **GREEDY)
    assert torch.equal(wrapped.generate(ids(1, 7), prompt_lookup_num_tokens=2, **GREEDY), want)
    for case in ("SEIE", "SKIK", STATES):
        _, wrapped = both(m, case)
        draft = dict(prompt_lookup_num_tokens=2, **GREEDY)
        refused(ValueError, "stateful", wrapped.generate, ids(1, 7), **draft)


# --- training ---------------------------------------------------------------------------------


def checkpointing_changes_no_gradient(m, case):
    _, wrapped = both(m, case)
    wrapped.train()
    logits = wrapped(ids(2, 7)).logits
    want = gradients(logits, wrapped.parameters())
    for reentrant in (False, True):
        wrapped.activation_checkpointing_enable(dict(use_reentrant=reentrant))
        calls = []
        layer = wrapped.model.blocks[0].layer
        hook = layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        out = wrapped(ids(2, 7), labels=ids(2, 7))
        assert out.past_key_values is None
        check(f"{case}, checkpointing: logits", out.logits, logits)
        wrapped.zero_grad()
        weights = torch.ones_like(out.logits).cumsum(1)
        (out.logits * weights).sum().backward()
        hook.remove()
        assert len(calls) == 2, "no layer is computed again"
        wrapped.activation_checkpointing_disable()
        got = [p.grad.clone() for p in wrapped.parameters()]
        wrapped.zero_grad()
        (wrapped(ids(2, 7)).logits * weights).sum().backward()
        for a, p in zip(got, wrapped.parameters(), strict=True):
            check(f"{case}, checkpointing: gradient", a, p.grad)
    assert want.isfinite().all()


def embeddings_are_resized(m, case):
    """Both matrices, tied or not; what was there stays."""
    net, wrapped = both(m, case)
    n = SIZES["vocab_size"]
    wrapped.resize_token_embeddings(n + 5)
    assert wrapped.config.vocab_size == n + 5 == wrapped.config.to_model_config().vocab_size
    tied = wrapped.lm_head.weight is wrapped.model.embedding.weight
    assert tied == net.config.tie_embeddings
    logits = wrapped(ids(2, 7)).logits
    assert logits.shape[-1] == n + 5
    check(f"{case}: what was there", logits[..., :n], net(ids(2, 7))[0])
    assert wrapped(torch.full((1, 2), n + 4)).logits.isfinite().all()


# --- files ------------------------------------------------------------------------------------


def is_loaded_as_it_was_saved(m, case, folder):
    """In one file or in many, to the last bit; it computes the same, up to rounding.

    A weight that was read is a view of the file at any multiple of 8 bytes, a weight that was made
    starts at a multiple of 64, and the order in which a matrix product adds depends on that.
    """
    net, wrapped = both(m, case)
    for i, size in enumerate(("1GB", "2KB")):
        wrapped.save_pretrained(folder / str(i), max_shard_size=size)
        assert (len([*(folder / str(i)).glob("*.safetensors")]) > 1) == (size == "2KB")
        again = m.CheemsForCausalLM.from_pretrained(folder / str(i))
        same(numbers(again), numbers(wrapped))
        check(f"{case}, loaded: logits", again(ids(2, 7)).logits, net(ids(2, 7))[0])
        assert again.config.to_model_config() == net.config
    base = m.CheemsModel.from_pretrained(folder / "0")
    same(numbers(base), numbers(wrapped.model))


def what_was_loaded_stays(m, folder):
    """Where some numbers are missing, they alone start anew."""
    _, wrapped = both(m, "SKIK")
    state = numbers(wrapped)
    lacking = {name for name in state if name.endswith((".D", "inner.dt_bias", "layer.up"))}
    lacking.add("model.blocks.0.norm.weight")
    assert len(lacking) > 4
    wrapped.save_pretrained(folder, state_dict={k: state[k] for k in state if k not in lacking})
    again = numbers(m.CheemsForCausalLM.from_pretrained(folder))
    for name, t in state.items():
        assert torch.equal(again[name], t) or name in lacking, f"{name} was loaded, and is lost"
        assert again[name].isfinite().all(), name
    assert torch.equal(again["model.blocks.0.layer.D"], torch.ones(4).double())


def sixteen_bits_leave_the_decay_in_float32(m, folder):
    for case in (*FEW, "SDICAX", "IPAM"):
        net, wrapped = both(m, case)
        wrapped.save_pretrained(folder / net.config.pattern)
        narrow = m.CheemsForCausalLM.from_pretrained(
            folder / net.config.pattern, dtype=torch.bfloat16
        )
        for name, p in narrow.named_parameters():
            wide = name.endswith(("A_log", "dt_bias"))
            assert p.dtype == (torch.float32 if wide else torch.bfloat16), name
        wrapped.to(torch.bfloat16)
        assert narrow(ids(2, 7)).logits.dtype == torch.bfloat16
        assert narrow.generate(ids(2, 7), **GREEDY).shape == (2, 13)


def memory_is_not_left_as_it_was_found(m, case):
    """Made on the meta device, no number is what the memory held, and each starts as it should."""
    c = model.ModelConfig(**dict(pattern=case) | START)
    empty_like = torch.empty_like

    def found(*args, **kwargs):
        t = empty_like(*args, **kwargs)
        return t.fill_(torch.nan) if t.is_floating_point() and not t.is_meta else t

    torch.manual_seed(1)
    want = numbers(m.from_causal_lm(model.CausalLM(c)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "empty_like", found)
        config = m.CheemsConfig.from_model_config(c)
        late = m.CheemsForCausalLM.from_pretrained(None, config=config, state_dict={})
    direct = m.CheemsForCausalLM(config)
    for name, t in want.items():
        for got in (numbers(late)[name], numbers(direct)[name]):
            assert got.isfinite().all(), f"{name} was not started"
            if t.std() > 0:
                assert not torch.equal(got, t), f"{name} is not drawn"
            if t.numel() > 500:
                near(name, got.std(), t.std())
                near(name, got.abs().max(), t.abs().max(), tol=0.35)
            elif t.std() == 0:
                assert torch.equal(got, t), name
            else:
                assert t.min() - 3 * t.std() <= got.mean() <= t.max() + 3 * t.std(), name
    tied = late.lm_head.weight is late.model.embedding.weight
    assert tied == c.tie_embeddings


START = dict(vocab_size=256, d_model=64, n_heads=8, d_state=16, d_ff=64, n_neurons=256)
START |= dict(inner="ssd", position="conv", tie_embeddings=False)


def near(name, got, want, tol=0.1):
    assert abs(got / want - 1) < tol, f"{name}: {got} for {want}"


def the_decay_starts_as_it_should(m):
    """A uniform in (1, 16), dt log-uniform in [1e-3, 1e-1], also when it is started late."""
    c = m.CheemsConfig(pattern="S" * 40, d_model=32, n_heads=16, d_state=2)
    net = m.CheemsForCausalLM.from_pretrained(None, config=c, state_dict={})
    layers = [block.layer for block in net.model.blocks]
    A = torch.cat([layer.A_log.detach().exp() for layer in layers])
    dt = torch.cat([F.softplus(layer.dt_bias.detach()) for layer in layers]).log()
    assert 1 <= A.min() < 1.2 and 15.8 < A.max() <= 16 and abs(A.mean() - 8.5) < 0.6
    assert -6.92 < dt.min() < -6.8 and -2.4 < dt.max() < -2.29 and abs(dt.mean() + 4.6) < 0.2


def a_run_goes_on_in_the_library(m, folder):
    """Of a directory the newest checkpoint, in its dtype."""
    for name, changes in dict(tied={}, untied=dict(tie_embeddings=False)).items():
        run = trained_run(folder / name, **changes)
        wrapped = m.from_run(folder / name)
        assert not wrapped.training
        pairs = zip(wrapped.parameters(), ordered(run.model, wrapped), strict=True)
        assert all(torch.equal(mine, its) for mine, its in pairs), "the weights differ"
        want = run.model(ids(2, 7, vocab=16))[0]
        check(f"{name}: logits", wrapped(ids(2, 7, vocab=16)).logits, want)
        names = {id(p) for p in run.model.parameters()} & {id(p) for p in wrapped.parameters()}
        assert not names, "they share numbers"


def trained_run(folder, **changes):
    from training import a_model

    return trained(training, folder, model=a_model(**changes), ids=a_text())


def what_is_not_whole_is_refused(m, folder):
    """Without weights, with half of them, with those of another model, by a newer version."""
    both(m, "SEIE")[1].save_pretrained(folder / "whole")
    config = json.loads((folder / "whole/config.json").read_text())

    def load(name, *, weights=lambda data: data, **changes):
        shutil.copytree(folder / "whole", folder / name)
        path = folder / name / "model.safetensors"
        data = weights(path.read_bytes())
        path.unlink() if data is None else path.write_bytes(data)
        (folder / name / "config.json").write_text(json.dumps(config | changes))
        return m.CheemsForCausalLM.from_pretrained(folder / name)

    assert load("as it was").config.to_model_config().pattern == "SEIE"
    refused(OSError, "no file named model.safetensors", load, "none", weights=lambda data: None)
    refused(SafetensorError, "not fully covered", load, "half", weights=lambda data: data[:-40])
    refused(RuntimeError, "ignore_mismatched_sizes", load, "wider", d_ff=24)
    refused(ValueError, "position must be one of .*'spin'", load, "newer", position="spin")
    refused(ValueError, "unknown letter 'Z' in pattern 'SZIE'", load, "letter", pattern="SZIE")
    for name in ("nowhere", "whole"):
        refused(CheckpointError, f"no checkpoint at .*{name}", m.from_run, folder / name)
        refused(CheckpointError, "no checkpoint at", m.export, folder / name, folder / "new")
    assert not (folder / "new").exists()


# --- the configuration ------------------------------------------------------------------------


def configurations_are_the_same(m, case, folder):
    """There and back, and through config.json."""
    c = model.ModelConfig(**options(case))
    config = m.CheemsConfig.from_model_config(c)
    assert config.to_model_config() == c
    config.save_pretrained(folder)
    again = m.CheemsConfig.from_pretrained(folder)
    assert again.to_model_config() == c
    written = json.loads((folder / "config.json").read_text())
    assert written["model_type"] == "cheems_ref"
    assert {f.name for f in dataclasses.fields(c)} <= written.keys(), "defaults are left out"
    names = dict(hidden_size="d_model", num_attention_heads="n_heads", intermediate_size="d_ff")
    names |= dict(tie_word_embeddings="tie_embeddings")
    for theirs, ours in names.items():
        assert getattr(config, theirs) == getattr(c, ours), theirs
    assert m.CheemsConfig(num_key_value_heads=2).to_model_config().n_kv_heads == 2
    assert config.num_hidden_layers == len(c.pattern) == len(config.layer_types)


def defaults_are_those_of_the_package(m):
    assert m.CheemsConfig().to_model_config() == model.ModelConfig()
    short = m.CheemsConfig(pattern="SM × 2 + A", hidden_size=32, tie_word_embeddings=False)
    assert short.to_model_config() == model.ModelConfig("SMSMA", d_model=32, tie_embeddings=False)
    kinds = ["linear_attention", "moe", "linear_attention", "moe", "full_attention"]
    assert short.layer_types == kinds
    assert m.CheemsConfig(pattern="IE", inner="ssd").layer_types == ["hybrid", "moe"]
    assert m.CheemsConfig(pattern="IE").layer_types == ["full_attention", "moe"]


# --- the tokenizer ----------------------------------------------------------------------------


def ids_are_bytes(m, folder):
    tokenizer = m.byte_tokenizer()
    assert len(tokenizer) == 256
    for words in ("", "Cheems", " déjà vu 🐕\n\tΔ  Ā ", "\x00\x7f", "don't  <|endoftext|>"):
        found = tokenizer(words)
        assert found.input_ids == text.text_to_ids(words).tolist() == [*words.encode()]
        assert [*found] == ["input_ids", "attention_mask"]
        assert tokenizer.decode(found.input_ids) == words
    padded = tokenizer(["a", "déjà"], padding=True)
    assert padded.input_ids == [[*(b"\0" * 5 + b"a")], [*"déjà".encode()]]
    assert padded.attention_mask == [[0] * 5 + [1], [1] * 6]
    assert tokenizer.batch_decode(padded.input_ids, skip_special_tokens=True) == ["a", "déjà"]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.decode([*b"it ' s , n't ."]) == "it ' s , n't ."
    every = torch.arange(256)
    assert tokenizer.decode(every) == text.ids_to_text(every)
    tokenizer.save_pretrained(folder)
    again = transformers.AutoTokenizer.from_pretrained(folder)
    assert again("Δ").input_ids == [*"Δ".encode()]


# --- what is exported -------------------------------------------------------------------------

ELSEWHERE = """
import sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

folder, copy = sys.argv[1:]
assert "cheems_ref" not in sys.modules
for auto in (AutoConfig, AutoModel):
    auto.from_pretrained(folder, trust_remote_code=True)
net = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
prompt = tokenizer("Ch", return_tensors="pt")
writes = pipeline("text-generation", folder, trust_remote_code=True)
(told,) = writes("Ch", max_new_tokens=4, do_sample=False)
torch.save([net(prompt.input_ids).logits, net.generate(**prompt, max_new_tokens=4)], copy)
assert told["generated_text"] == tokenizer.decode(torch.load(copy)[1][0])
net.save_pretrained(folder)  # again, by the library alone
again = AutoModelForCausalLM.from_pretrained(folder)
for name, p in net.named_parameters():
    assert torch.equal(again.get_parameter(name), p), name
torch.testing.assert_close(again(prompt.input_ids).logits, net(prompt.input_ids).logits)
"""


def test_what_is_exported_is_loaded_elsewhere(tmp_path):
    """In a process of its own, without the network, with trust_remote_code=True."""
    run = trained_run(tmp_path / "run", vocab_size=256)
    folder = hub.export(tmp_path / "run", tmp_path / "exported")
    environment = dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home"), OMP_NUM_THREADS="1")
    finished = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, folder, tmp_path / "found.pt"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    logits, written = torch.load(tmp_path / "found.pt")
    prompt = text.text_to_ids("Ch")[None]
    check("elsewhere: logits", logits, run.model(prompt)[0])
    want = generate(run.model, prompt, 4, Sampling(temperature=0))
    assert torch.equal(written[:, 2:], want)


def what_is_exported_says_what_it_is(m, folder):
    run = trained_run(folder / "run", vocab_size=300)
    m.export(folder / "run", folder / "out")
    card = (folder / "out" / "README.md").read_text()
    n = sum(p.numel() for p in run.model.parameters())
    for line in (f"{n:,}, in float32", "pattern: `AM`"):
        assert line in card, f"the card lacks {line!r}"
    assert "{" not in card
    code = (folder / "out" / "modeling_cheems_ref.py").read_text()
    bound = {}
    exec(code, bound)
    mapped = json.loads((folder / "out" / "config.json").read_text())["auto_map"]
    kinds = dict(Config="CheemsConfig", Model="CheemsModel", ModelForCausalLM="CheemsForCausalLM")
    assert mapped == {f"Auto{k}": f"modeling_cheems_ref.{name}" for k, name in kinds.items()}
    for name in kinds.values():
        assert name in bound and bound[name].__name__ == name, f"the code lacks {name}"
    trained_run(folder / "small")
    message = "16 ids, and a text 256 bytes"
    refused(ValueError, message, m.export, folder / "small", folder / "none")
    assert not (folder / "none").exists()


# --- bad input --------------------------------------------------------------------------------


def called(m, case="SEIE", **changes):
    return both(m, case)[1](**dict(input_ids=ids(2, 5)) | changes)


# fmt: off
BAD_CALLS = [
    (dict(inputs_embeds=torch.zeros(2, 5, 16)), "input_ids or inputs_embeds, and not both"),
    (dict(input_ids=None), "input_ids or inputs_embeds, and not both"),
    (dict(input_ids=ids(2, 5).float()), r"input_ids must be torch.int64 or .*float32"),
    (dict(input_ids=torch.tensor([[3, 19]])), r"in \[0, 19\) .*entries in \[3, 19\]"),
    (dict(attention_mask=torch.ones(2, 4)), r"attention_mask must be .*\(2, 5\), .*\(2, 4\)"),
    (dict(position_ids=torch.arange(4)[None]), r"position_ids .*\(1, 4\)"),
    (dict(case="IDSP", input_ids=ids(2, 21)), "21 tokens.*max_positions = 20"),
]
BAD_CONFIGS = [
    (dict(pattern="SQ"), ValueError, "unknown letter 'Q'"),
    (dict(d_model=0), ValueError, "d_model must be at least 1"),
    (dict(n_heads="4"), TypeError, "n_heads must be a whole number"),
    (dict(norm_eps=1.0), ValueError, r"norm_eps must be a number in \(0, 1\)"),
]
# fmt: on


def a_bad_call_is_refused(m, i):
    arguments, message = BAD_CALLS[i]
    refused(ValueError, message, called, m, **arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("arguments, error, message", BAD_CONFIGS)
def test_a_bad_configuration_is_refused(arguments, error, message):
    refused(error, message, hub.CheemsConfig, **arguments)


def test_nothing_in_gives_nothing_out():
    net, wrapped = both(hub, "SEIE")
    out = wrapped(ids(2, 0))
    assert out.logits.shape == (2, 0, 19) and out.past_key_values.get_seq_length() == 0
    got = wrapped(ids(2, 5), past_key_values=out.past_key_values).logits
    check("after an empty text: logits", got, net(ids(2, 5))[0])


def test_every_module_with_numbers_of_its_own_starts_them_itself():
    for case in MODELS:
        for name, module in both(hub, case)[1].named_modules():
            own = [*module.parameters(recurse=False)]
            assert not own or hasattr(module, "reset_parameters"), f"{case}: {name}"


# --- the hub has them -------------------------------------------------------------------------


def titled(*rows):
    """As models.titled, where a case may be options."""
    return {asked(*[part for part in row if part is not None]): row for row in rows}


HELD = titled(
    *itertools.product(
        (computes_what_the_package_computes, calls_join_up, writes_what_the_package_writes), CASES
    ),
    *itertools.product(
        (
            no_cache_is_written_where_none_is_asked_for,
            a_cache_is_copied_reset_and_reordered,
            it_goes_on_from_a_cache,
            beams_are_those_without_a_cache,
            samples_are_those_without_a_cache,
            checkpointing_changes_no_gradient,
        ),
        FEW,
    ),
    *itertools.product((embeddings_are_resized,), ("SEIE", "SHSRAH")),
    *itertools.product((memory_is_not_left_as_it_was_found,), ("SIP", "SKE", "AMR")),
    (keeps_the_logits_that_are_asked_for, None),
    (the_loss_is_that_of_the_next_token, None),
    (positions_given_are_taken, None),
    (angles_are_made_once, None),
    (states_cannot_be_cropped, None),
    (it_stops_where_it_is_told, None),
    (tokens_are_drafted_only_without_states, None),
    (the_decay_starts_as_it_should, None),
    (defaults_are_those_of_the_package, None),
    *itertools.product((a_bad_call_is_refused,), range(len(BAD_CALLS))),
)
WRITTEN = titled(
    *itertools.product((is_loaded_as_it_was_saved, configurations_are_the_same), CASES),
    (what_was_loaded_stays, None),
    (sixteen_bits_leave_the_decay_in_float32, None),
    (a_run_goes_on_in_the_library, None),
    (what_is_not_whole_is_refused, None),
    (ids_are_bytes, None),
    (what_is_exported_says_what_it_is, None),
)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("has_property, case", HELD.values(), ids=HELD)
def test_the_hub_has_the_property(has_property, case):
    ask_hub(has_property, case)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("has_property, case", WRITTEN.values(), ids=WRITTEN)
def test_the_hub_has_the_property_on_disk(has_property, case, tmp_path):
    ask_hub(has_property, case, folder=tmp_path)


def ask_hub(has_property, case, **folder):
    has_property(hub, *([] if case is None else [case]), **folder)


@pytest.mark.usefixtures("unchecked")
def test_a_plain_dynamic_cache_will_do_where_it_can_count():
    for case in ("SEIE", "SKIK", ATTENTION):
        calls_join_up(hub, case, make=lambda config: DynamicCache(config=config))
