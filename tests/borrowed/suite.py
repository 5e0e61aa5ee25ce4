"""The library's own tests on the hub's models: run.py puts this file among them.

This file copies none of their code. Comments say why it overrides a test: the library's tests
assume the library's model classes.
"""

import json
import os
import unittest

from tests.generation import test_utils as generation
from tests.test_configuration_common import ConfigTester

from cheems_lab.hub import CheemsConfig, CheemsForCausalLM, CheemsModel
from tests import test_modeling_common as common

CASE = json.loads(os.environ["CHEEMS_CASE"])
SIZES = dict(
    vocab_size=99,
    d_model=32,
    n_heads=4,
    d_state=8,
    chunk_size=8,
    d_ff=32,
    n_neurons=16,
    d_query=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def nearly_one(config):
    """They set norm_eps to 1.0, and a dozen names that no such configuration has; ours is < 1."""
    config.norm_eps = 0.99


common.set_config_for_less_flaky_test = generation.set_config_for_less_flaky_test = nearly_one
# By these names they know which classes have a loss, and hand them labels.
common.MODEL_MAPPING_NAMES["cheems_ref"] = "CheemsModel"
common.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["cheems_ref"] = "CheemsForCausalLM"


class Tester:
    """A small configuration and inputs for it, as the library's tests expect."""

    is_training = use_cache = True
    batch_size, seq_length, hidden_size, num_attention_heads, vocab_size = 3, 7, 32, 4, 99
    encoder_seq_length = key_length = seq_length
    num_hidden_layers = len(CASE["pattern"])

    def get_config(self):
        return CheemsConfig(**SIZES | CASE)

    def prepare_config_and_inputs_for_common(self):
        shape = [self.batch_size, self.seq_length]
        ids, mask = common.ids_tensor(shape, 99), common.random_attention_mask(shape)
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


# They ask the class, ours differ by pattern: whether tokens that were drafted can be taken back.
CheemsForCausalLM._is_stateful = CheemsForCausalLM(Tester().get_config())._is_stateful


class CheemsTest(common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (CheemsModel, CheemsForCausalLM)
    has_attentions = False  # the layers return no weights
    test_can_init_all_missing_weights_before_2023 = True  # which they guess from a copyright line
    pipeline_model_mapping = {}  # noqa: RUF012

    def setUp(self):
        # They also use it for padding.
        self.has_attentions = self._testMethodName == "test_left_padding_compatibility"
        self.model_tester = Tester()
        names = ["hidden_size", "num_attention_heads", "num_hidden_layers"]
        self.config_tester = ConfigTester(
            self, config_class=CheemsConfig, common_properties=names, **CASE
        )

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        """In place of theirs, which guesses the shapes of states from the configuration."""
        assert len(past_key_values.layers) == config.num_hidden_layers
        for layer, letter in zip(past_key_values.layers, config.pattern, strict=True):
            if letter in "AI":
                assert layer.keys.shape == layer.values.shape == (batch_size, 4, seq_length, 8)
            if letter == "S" or (letter == "I" and config.inner == "ssd"):
                assert layer.recurrent_states[0].shape == (batch_size, 4, 8, 8)

    def test_config(self):
        self.config_tester.run_common_tests()
