"""Mistakes in the command `budget` that the properties of test_budget_command.py must catch."""

from planting import mistakes
from test_budget_command import (
    a_batch_and_a_dtype_are_taken,
    a_length_that_is_not_given_is_the_context,
    a_plot_is_drawn,
    memory_is_that_of_weights_and_cache,
    speed_is_bounded_by_what_is_scarcer,
    the_table_is_that_of_the_model,
)

from cheems_ref import arguments, budget_command

ROOMS = (arguments, budget_command)
UNCHECKED = True

# fmt: off
MISTAKES = mistakes([
    (the_table_is_that_of_the_model, {
        "of one row": [("flops = count_flops(config, length, batch=batch)",
                        "flops = count_flops(config, length)")],
        "kept by one row": [("kept = activation_bytes(config, length, batch=batch, dtype=dtype)",
                             "kept = activation_bytes(config, length, dtype=dtype)")],
        "total and at work exchanged": [("count.total, count.active", "count.active, count.total")],
        "the last part alone": [("one + other for one, other", "other for one, other")],
        "all layers": [("config.pattern.count(part) if part", "len(config.pattern) if part")],
        "binary gigabytes": [("{size / 1e9:,.3f}", "{size / 2**30:,.3f}")]}),
    (memory_is_that_of_weights_and_cache, {
        "parameters at work": [
            ("weights = sum(part.total for part in count_parameters(config).values())"
             " * dtype.itemsize\n    cache", "weights = sum(part.active for part in "
             "count_parameters(config).values()) * dtype.itemsize\n    cache")],
        "keys are the rest": [("{_gigabytes(cache.total() - cache.keys_values):>10}",
                               "{_gigabytes(cache.total()):>10}")],
        "everything fits": [("if size <= memory * 1e9", "if True")],
        "weights alone fit": [("_fits(weights + cache.total()", "_fits(weights")],
        "in sixteen bits": [("states = training_bytes(config)",
                             "states = training_bytes(config, dtype=dtype)")]}),
    (a_batch_and_a_dtype_are_taken, {
        "always sixteen bits": [("getattr(torch, a.dtype)", "torch.bfloat16")],
        "a cache of one row": [("cache_bytes(config, a.context, batch=a.batch, dtype=dtype)",
                                "cache_bytes(config, a.context, dtype=dtype)")],
        "a step of one row": [("step_bytes(config, a.context, batch=a.batch",
                               "step_bytes(config, a.context, batch=1")],
        "a step without context": [("count_flops(config, 1, context=a.context",
                                    "count_flops(config, 1, context=0")],
        "an update is a pass": [("work = 3 * sum(", "work = sum(")]}),
    (speed_is_bounded_by_what_is_scarcer, {
        "by what is plentiful": [("what = max(times", "what = min(times")],
        "rows, not tokens": [("{a.batch / times[what]:,.0f}", "{1 / times[what]:,.0f}")],
        "an update of one row": [("{a.batch * a.length / (work", "{a.length / (work")]}),
    (a_length_that_is_not_given_is_the_context, {
        "it is the default": [("a.length = a.context if", "a.length = 4096 if")]}),
    (a_plot_is_drawn, {
        "not at all": [("    fig.savefig(a.plot)\n", "")]}),
])
# fmt: on
