"""Mistakes that the properties of test_hub.py must catch."""

from planting import mistakes
from test_hub import HELD as ASKED
from test_hub import (
    STATES,
    WRITTEN,
    a_bad_call_is_refused,
    a_cache_is_copied_reset_and_reordered,
    a_run_goes_on_in_the_library,
    angles_are_made_once,
    beams_are_those_without_a_cache,
    calls_join_up,
    checkpointing_changes_no_gradient,
    computes_what_the_package_computes,
    configurations_are_the_same,
    defaults_are_those_of_the_package,
    ids_are_bytes,
    is_loaded_as_it_was_saved,
    it_goes_on_from_a_cache,
    keeps_the_logits_that_are_asked_for,
    memory_is_not_left_as_it_was_found,
    newer_configurations_are_refused,
    no_cache_is_written_where_none_is_asked_for,
    positions_given_are_taken,
    sixteen_bits_leave_the_decay_in_float32,
    states_cannot_be_cropped,
    the_decay_starts_as_it_should,
    the_library_knows_what_stays_together,
    the_loss_is_that_of_the_next_token,
    tokens_are_drafted_only_without_states,
    what_is_exported_says_what_it_is,
    what_was_loaded_stays,
    writes_what_the_package_writes,
)
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from cheems_ref import hub, hub_texts

ROOMS = (hub_texts, hub)
HELD = ASKED | WRITTEN
REGISTRIES = (CONFIG_MAPPING, MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
UNCHECKED = True  # else jaxtyping answers before the hub does

COUNTED = "((counted if real is None else real).cumsum(1) - 1).clamp(min=0)"
STATE = "state = SSDCache(layer.recurrent_states[0], conv.mT if conv.shape[1] else None)"
NEW = "(t[:, t.shape[1] - length :].transpose(1, 2) for t in (new.k, new.v))"
LOADED = 'if getattr(p, "_is_hf_initialized", False)}'
RESET = "            module.reset_parameters()\n"

# fmt: off
PLANTED = [
    (computes_what_the_package_computes, "SEIE", {
        "the mask is not looked at": [("padding_mask=now", "padding_mask=None")],
        "positions count padding": [(COUNTED, "counted.cumsum(1) - 1")],
        "positions from 1": [(COUNTED, COUNTED.replace(" - 1)", ")"))],
        "no last norm": [("Past(self.norm(x), past", "Past(x, past")],
        "eps of the last norm left out": [
            ("nn.RMSNorm(sizes.d_model, eps=sizes.norm_eps)", "nn.RMSNorm(sizes.d_model)")],
        "the head is not the embedding": [
            ('state | {"lm_head.weight": head.weight}', "state, strict=False"),
            ("copy.load_state_dict(", "copy.lm_head = nn.Linear(copy.config.d_model, "
             "copy.config.vocab_size, bias=False).double()\n    copy.load_state_dict(")],
        "no gradient to what comes first": [
            ("return self.embedding(input_ids.long())",
             "return self.embedding(input_ids.long()).detach()")]}),
    (computes_what_the_package_computes, "SHSRAH", {
        "tied against its will": [
            ("head = model.embedding if model.lm_head is None else model.lm_head",
             "head = model.embedding")]}),
    (keeps_the_logits_that_are_asked_for, {
        "all but": [("slice(-kept, None)", "slice(kept, None)")],
        "never": [("[:, kept])", ")")]}),
    (the_loss_is_that_of_the_next_token, {
        "of the token itself": [
            ("self.loss_function(logits, labels,",
             "self.loss_function(logits, None, shift_labels=labels,")],
        "of the batch alone": [(", vocab_size=self.config.vocab_size, **kwargs)",
                                ", vocab_size=self.config.vocab_size)")]}),
    (positions_given_are_taken, {
        "passed over": [(" if position_ids is None else position_ids\n", "\n")]}),
    (angles_are_made_once, {
        "in each layer": [("rotary=RotaryTable(position_ids)", "rotary=None")]}),
    (calls_join_up, "SEIE", {
        "the state is forgotten": [(STATE, "pass")],
        "all keys are written again": [("t.shape[1] - length :]", "0 :]")],
        "keys and values exchanged": [("in (new.k, new.v))", "in (new.v, new.k))")],
        "tokens of the call are not counted": [("n_tokens += length", "n_tokens += 0")],
        "one token for each call": [("n_tokens += length", "n_tokens += 1")],
        "earlier padding is forgotten": [
            ("real[:, :past], real[:, past:]", "None, real[:, past:]")]}),
    (calls_join_up, "SHSRAH", {
        "the convolution's tokens turned round": [
            ("else state.conv.mT, i)", "else state.conv.mT.flip(-1), i)")]}),
    (calls_join_up, "SKIK", {
        "the inner state is not handed on": [("k, v, real, position_ids, state)",
                                              "k, v, real, position_ids, state and "
                                              "state._replace(state=0 * state.state))")],
        "only the first call's is written": [
            ("state = new.inner\n",
             "state = new.inner if cache.get_seq_length() == 0 else None\n")]}),
    (calls_join_up, "IRIG", {
        "keys' positions begin anew": [("counted[:, :past])", "0 * counted[:, :past])")]}),
    (calls_join_up, STATES, {
        "no state is believed to be there": [
            ("        cache.update_conv_state(", "        (lambda *_: None)(")]}),
    (no_cache_is_written_where_none_is_asked_for, "SEIE", {
        "written all the same": [
            ("use_cache=use_cache, rotary", "use_cache=past_key_values is not None, rotary")],
        "counted all the same": [("if use_cache and isinstance(past_key_values, StateCache)",
                                  "if isinstance(past_key_values, StateCache)")],
        "handed back": [("past_key_values if use_cache else None)", "past_key_values)")]}),
    (a_cache_is_copied_reset_and_reordered, STATES, {
        "generate() compiles": [("is_compileable = False", "is_compileable = True")],
        "its count stays": [("        super().reset()\n        self.n_tokens = 0",
                             "        super().reset()")]}),
    (states_cannot_be_cropped, {
        "without a word": [
            ("raise ValueError(\n            f\"a cache", "_ = (\n            f\"a cache")]}),
    (writes_what_the_package_writes, "SEIE", {
        "the mask of the first token": [("real[:, past:])", "real[:, :length])")]}),
    (it_goes_on_from_a_cache, "SEIE", {
        "another cache": [(' and model_kwargs.get("past_key_values") is None', "")]}),
    (the_library_knows_what_stays_together, {
        "nothing": [('_no_split_modules = ("CheemsBlock",)', "_no_split_modules = ()")],
        "caches are moved": [
            ('    _skip_keys_device_placement = ("past_key_values",)\n', "")]}),
    (beams_are_those_without_a_cache, STATES, {
        "states are not reordered": [
            ("    def crop(", "    def reorder_cache(self, beam_idx):\n        pass\n\n"
             "    def crop(")]}),
    (tokens_are_drafted_only_without_states, {
        "with states too": [("self._is_stateful = _has_states(config)",
                             "self._is_stateful = False")]}),
    (checkpointing_changes_no_gradient, "SEIE", {
        "everything is kept": [("class CheemsBlock(Block, GradientCheckpointingLayer)",
                                "class CheemsBlock(Block)")]}),
    (is_loaded_as_it_was_saved, "SDICAX", {
        "under another name": [
            ('base_model_prefix = "model"', 'base_model_prefix = "stack"')]}),
    (what_was_loaded_stays, {
        "started anew": [("            parameter.copy_(value)\n", "            pass\n")],
        "nothing is known to be loaded": [(LOADED, "if False}")]}),
    (sixteen_bits_leave_the_decay_in_float32, {
        "all in sixteen bits": [("= KEPT_IN_FLOAT32 &", "= set() &")],
        "half of it": [('{"A_log", "dt_bias"}', '{"A_log"}')]}),
    (memory_is_not_left_as_it_was_found, "SIP", {
        "as the library starts them": [
            (RESET, "            super()._init_weights(module)\n")],
        "maps alone": [("elif own and hasattr(module, \"reset_parameters\")",
                        "elif isinstance(module, nn.Linear | nn.RMSNorm)")],
        "the embedding as torch starts it": [
            ("nn.init.normal_(module.weight, std=0.02)", "nn.init.normal_(module.weight)")]}),
    (the_decay_starts_as_it_should, {
        "as the library starts it": [
            (RESET, "            super()._init_weights(module)\n")],
        "dt twice": [(RESET, RESET + '            hasattr(module, "A_log") and '
                                     "module.dt_bias.mul_(2)\n")]}),
    (a_run_goes_on_in_the_library, {
        "in training": [(".eval())", ")")]}),
    (configurations_are_the_same, "SEIE", {
        "no heads of keys": [
            ("return self.n_kv_heads or self.n_heads", "return self.n_kv_heads")]}),
    (configurations_are_the_same, "SHSRAH", {
        "a name for another": [('"hidden_size": "d_model"', '"hidden_size": "d_ff"')],
        "heads of keys": [("return self.n_kv_heads or self.n_heads", "return self.n_heads")],
        "groups that are not set": [("self.n_kv_heads = number", "pass")],
        "width inside": [('"intermediate_size": "d_ff"', '"intermediate_size": "d_model"')]}),
    (defaults_are_those_of_the_package, {
        "patterns are not spelled out": [
            ("self.pattern = self.to_model_config().pattern", "self.to_model_config()")],
        "I has no state": [('kept["I"] = "hybrid"', 'kept["I"] = "full_attention"')],
        "I always has": [('if self.inner == "ssd":', "if True:")]}),
    (newer_configurations_are_refused, {
        "taken for one of the library": [("        if unknown:", "        if False:")]}),
    (ids_are_bytes, {
        "signs as they come": [("sorted(pre_tokenizers.ByteLevel.alphabet())",
                                "sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)")],
        "padding on the right": [(', padding_side="left"', "")],
        "an id for padding": [('    vocabulary["\\0"] = vocabulary.pop("Ā")', "    pass")],
        "a space in front": [("add_prefix_space=False", "add_prefix_space=True")],
        "spaces cleaned up": [("    tokenizer.decoder = decoders.ByteLevel()\n", "")]}),
    (what_is_exported_says_what_it_is, {
        "any vocabulary": [("if model.config.vocab_size < 256:", "if False:")],
        "tied matrices counted twice": [
            ("model.num_parameters()",
             "sum(t.numel() for t in model.state_dict().values())")]}),
    (a_bad_call_is_refused, 0, {
        "both are taken": [("if (input_ids is None) == (inputs_embeds is None):",
                            "if input_ids is inputs_embeds is None:")]}),
    (a_bad_call_is_refused, 5, {
        "others are taken for the last": [
            ("        check.token_ids(self.config.vocab_size, input_ids=input_ids)\n",
             "        input_ids = input_ids.clamp(0, self.config.vocab_size - 1)\n")]}),
    (a_bad_call_is_refused, 7, {
        "masks of any length": [("tuple(mask.shape) != (b, past + length)", "False")]}),
    (a_bad_call_is_refused, 14, {
        "rows are not counted": [("if t is not None and len(t) != b:", "if False:")]}),
    (a_bad_call_is_refused, 16, {
        "layers are not compared": [("if layers != self._layers or not counts:",
                                     "if not counts:")]}),
    (a_bad_call_is_refused, 20, {
        "whoever counts": [("if layers != self._layers or not counts:",
                            "if layers != self._layers:")]}),
    (a_bad_call_is_refused, 23, {
        "the table for the text": [('f"{tokens} tokens, but', 'f"{n} tokens, but')]}),
]
PLANTED_TEXTS = [
    (what_is_exported_says_what_it_is, {
        "classes exchanged": [
            ("{REMOTE}.CheemsModel", "{REMOTE}.CheemsForCausalLM"),
            ('"AutoModelForCausalLM": f"{REMOTE}.CheemsForCausalLM"',
             '"AutoModelForCausalLM": f"{REMOTE}.CheemsModel"')],
        "code without the model": [(", CheemsForCausalLM, CheemsModel\n", ", CheemsForCausalLM\n")],
        "defaults too": [("if getattr(config, name) != default]", "]")],
        "no pattern": [("        pattern=config.pattern,\n", "        pattern='',\n")]}),
]
# fmt: on

MISTAKES = [*mistakes(PLANTED, hub), *mistakes(PLANTED_TEXTS, hub_texts)]
