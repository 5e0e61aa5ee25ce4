"""Mistakes in the command `budget` that the properties of test_budget_command.py must catch."""

from planting import mistakes
from test_budget_command import (
    a_batch_and_a_dtype_are_taken,
    a_length_that_is_not_given_is_the_context,
    a_plot_is_drawn,
    curves_are_weights_and_caches,
    memory_is_that_of_weights_and_cache,
    processes_share_an_update,
    speed_is_bounded_by_what_is_scarcer,
    the_table_is_that_of_the_model,
    training_counts_the_gradient_of_the_logits,
)

from cheems_ref import arguments, budget_command

ROOMS = (arguments, budget_command)
UNCHECKED = True
WEIGHTS = "weights = sum(part.total for part in count_parameters(config).values()) * dtype.itemsize"
KEPT = "kept = activation_bytes(config, a.length, batch=a.batch, dtype=dtype)"

# fmt: off
MISTAKES = mistakes([
    (the_table_is_that_of_the_model, {
        "of one row": [("flops = count_flops(config, a.length, batch=a.batch)",
                        "flops = count_flops(config, a.length)")],
        "kept by one row": [(KEPT, KEPT.replace("batch=a.batch, ", ""))],
        "total and at work exchanged": [("count.total, count.active", "count.active, count.total")],
        "the last part alone": [("one + other for one, other", "other for one, other")],
        "all layers": [("str(config.pattern.count(part)) if", "str(len(config.pattern)) if")],
        "binary prefixes": [("{number / 1000**at:.3g}", "{number / 1024**at:.3g}")]}),
    (memory_is_that_of_weights_and_cache, {
        "weights of four bytes": [(WEIGHTS + "\n    cache", WEIGHTS[:-14] + "4\n    cache")],
        "keys are the rest": [("{_si(cache.total() - cache.keys_values, 'B'):>10}",
                               "{_si(cache.total(), 'B'):>10}")],
        "everything fits": [("if size <= memory * 1e9", "if True")],
        "weights alone fit": [("_fits(weights + cache.total()", "_fits(weights")],
        "in sixteen bits": [("training_bytes(config, processes=",
                             "training_bytes(config, dtype=torch.bfloat16, processes=")]}),
    (training_counts_the_gradient_of_the_logits, {
        "not": [("_fits(parameters + kept + logits, a", "_fits(parameters + kept, a")],
        "of one row": [("4 * share * a.length * config", "4 * a.length * config")],
        "nothing is kept": [("sum(kept.values()))", "0)")]}),
    (processes_share_an_update, {
        "parameters are not shared": [("training_bytes(config, processes=a.processes)",
                                       "training_bytes(config)")],
        "nor what is kept": [("kept = kept // a.processes", "kept = kept * 1")],
        "each has all logits": [("a.batch / a.processes", "a.batch")],
        "each does everything": [("flops.values()) // a.processes", "flops.values())")],
        "not said": [("if a.processes > 1 else", "if False else")]}),
    (a_batch_and_a_dtype_are_taken, {
        "always sixteen bits": [("getattr(torch, a.dtype)", "torch.bfloat16")],
        "a cache of one row": [("cache_bytes(config, a.context, batch=a.batch, dtype=dtype)",
                                "cache_bytes(config, a.context, dtype=dtype)")],
        "a step of one row": [("step_bytes(config, a.context, batch=a.batch",
                               "step_bytes(config, a.context, batch=1")],
        "a step without context": [("count_flops(config, 1, context=a.context",
                                    "count_flops(config, 1, context=0")],
        "an update is a pass": [("3 * part.total()", "part.total()")],
        "scores are kept": [(" + part.pairs // 2", "")]}),
    (speed_is_bounded_by_what_is_scarcer, {
        "by what is plentiful": [("what = max(times", "what = min(times")],
        "rows, not tokens": [("{a.batch / times[what]:,.0f}", "{1 / times[what]:,.0f}")],
        "an update of one row": [("{a.batch * a.length / (work", "{a.length / (work")]}),
    (a_length_that_is_not_given_is_the_context, {
        "it is the default": [("max(1, a.context) if", "4096 if")],
        "or nothing": [("max(1, a.context) if", "a.context if")]}),
    (curves_are_weights_and_caches, {
        "of one row": [("cache_bytes(config, n, batch=batch, dtype=dtype)",
                        "cache_bytes(config, n, dtype=dtype)")],
        "weights once": [("weights + cache for cache", "cache for cache")]}),
    (a_plot_is_drawn, {
        "not at all": [("    fig.savefig(a.plot)\n", "")]}),
])
# fmt: on
