"""Mistakes that the properties of test_command_line.py must catch."""

from planting import mistakes
from test_command_line import (
    a_finished_run_says_so,
    a_terminal_without_columns_has_lines,
    fields_have_the_effect_that_is_told,
    foresees_memory,
    goes_on_from_where_it_was_stopped,
    hands_on_every_option,
    helps,
    is_evaluated_where_it_was_stopped,
    is_stopped_where_it_was_just_saved,
    letters_are_never_torn,
    lines_say_where_it_is,
    refuses_runs_of_another_kind,
    refuses_to_write_nonsense,
    refuses_to_write_past_the_table,
    refuses_wrong_settings,
    refuses_wrong_use,
    says_that_it_learned_nothing,
    says_that_the_interpreter_runs,
    says_what_is_at_work,
    says_what_it_does,
    takes_any_model,
    the_bar_is_as_told,
    the_second_ctrl_c_stops_at_once,
    the_seed_decides,
    trains_longer,
    what_changes_no_loss_may_change,
    writes_what_the_model_does,
)

from cheems_ref import arguments, command_line, help_texts, watch

ROOMS = (help_texts, arguments, watch, command_line)
UNCHECKED = True  # as users have it

DECODED = "decoder.decode(bytes(token.tolist()))"
EVALUATED = "if run.evaluations and run.evaluations[-1][0] == run.step:"
KEPT = 'for name in ("steps", "evaluate_every", "checkpoint_every"):'

# fmt: off
MISTAKES = mistakes([
    (says_what_it_does, {
        "nats for bits": [("nats / math.log(2)", "nats")],
        "the update for its loss": [
            ("nats = run.evaluations[-1][1]", "nats = run.evaluations[-1][0]")],
        "letters for bytes": [
            ("text.text_to_ids(text.read_text(a.text), dtype=torch.uint8)",
             "text.text_to_ids(text.read_text(a.text), dtype=torch.uint8)[:-20]")],
        "windows for bytes": [
            ("{training.batch_size * training.length:,} per", "{training.batch_size:,} per")],
        "another place": [("'generate', '--run', a.run", "'generate', '--run', a.text")],
        "any Python": [("words = [sys.executable,", 'words = ["python",')],
        "as it stands": [("else shlex.join(words)", 'else " ".join(words)')]}),
    (says_what_is_at_work, {
        "all of them": [("if parameters == active:", "if True:")],
        "all of the pattern": [("if len(pattern) <= LONG:", "if True:")]}),
    (hands_on_every_option, {
        "the seed of the weights left out": [
            ("torch.manual_seed(training.seed)", "torch.manual_seed(0)")],
        "no options": [("if k in names and v is not None}", 'if k == "steps"}')],
        "no checkpoints but the last": [
            ('add("--checkpoint-every", type=int',
             'add("--checkpoint-every", type=lambda n: 99')],
        "float32": [
            ("given = {k: v", 'given = {k: {"bfloat16": "float32"}.get(v, v)')]}),
    (takes_any_model, {
        "numbers as words": [("return name, read(value)", "return name, value")],
        "the vocabulary of the preset": [('{"vocab_size": BYTES, **a.set}', "a.set")],
        "only the first setting": [
            ("a.set = dict(_setting(words, others=others) for words in a.set)",
             "a.set = dict(_setting(words, others=others) for words in a.set[:1])")],
        "another default": [('PATTERN = "SESESEIE"', 'PATTERN = "SEIE"')],
        "presets left out": [
            ("base = preset(a.preset) if a.preset else ModelConfig", "base = ModelConfig")],
        "JSON alone": [("(json.loads, ast.literal_eval)", "(json.loads,)")],
        "words refused": [("return name, value  #", "raise ValueError  #")]}),
    (goes_on_from_where_it_was_stopped, {
        "as an error": [
            ('{again}", file=sys.stderr)\n        return 130',
             '{again}", file=sys.stderr)\n        return 1')],
        "without a word": [("{watch.stopped()}", "stopped")],
        "not caught": [
            ("    except KeyboardInterrupt:\n        again",
             "    except EOFError:\n        again"),
            ('        say("\\nstopped", file=sys.stderr)\n', "        raise\n")],
        "in the middle of an update": [
            ("        watch.asked = True\n", "        raise KeyboardInterrupt\n")],
        "not saved": [("                save(run, self.directory)\n", "                pass\n")],
        "another command": [("in_shell(*a.words)", "in_shell('train', '--run', a.run)")],
        "nothing said": [('say(f"going on from', 'str(f"going on from')],
        "another signal": [
            ("            signal.signal(signal.SIGINT, before)", "            pass")],
        "nothing kept": [("                directory=a.run,\n", "")]}),
    (is_stopped_where_it_was_just_saved, {
        "saved twice": [("if run.step % run.config.checkpoint_every:", "if True:")],
        "stopped at its end": [
            ("if asked and run.step < run.config.steps:", "if asked:")]}),
    (the_second_ctrl_c_stops_at_once, {
        "it waits": [("if watch.asked and alone:", "if False:")]}),
    (a_finished_run_says_so, {
        "not said": [("if run.step >= steps:", "if False:")],
        "said otherwise": [("{steps} updates are done;", "{steps + 1} updates are done;")]}),
    (trains_longer, {
        "a schedule of its own": [
            ("        schedule = schedule or before.get", "        before.get")],
        "not said": [("if schedule is not None and schedule < steps:", "if False:")],
        "always the default": [(KEPT, 'given.setdefault("steps", 1000)\n    ' + KEPT)],
        "fewer than are done": [('if given["steps"] < done:', "if False:")]}),
    (what_changes_no_loss_may_change, {
        "they stay": [("given.setdefault(name, before[name])", "given[name] = before[name]")]}),
    (is_evaluated_where_it_was_stopped, {
        "the last evaluation": [
            (EVALUATED, "if run.evaluations or [run.evaluations.append((0, 9))]:")],
        "on what is trained on": [
            ("split_text(ids, training.held_out)[1]", "split_text(ids, training.held_out)[0]")]}),
    (the_bar_is_as_told, {
        "not told": [("                bar=bar,\n", "                bar=None,\n")],
        "never by itself": [("        return True\n", "        return False\n")],
        "the wrong way": [("        return bool(told)\n", "        return not told\n")],
        "no lines": [("lines=not bar)", "lines=False)")],
        "both": [("lines=not bar)", "lines=True)")]}),
    (a_terminal_without_columns_has_lines, {
        "a bar": [(".columns > 0", ".columns >= 0")]}),
    (lines_say_where_it_is, {
        "all the time": [("now - self.said >= SILENCE", "True")],
        "never between": [("now - self.said >= SILENCE", "False")],
        "not at first": [("or is_first or", "or")],
        "not when it is evaluated": [("(evaluated or is_first", "(is_first")],
        "not at once": [("print(line, file=file, flush=True)", "print(line, file=file)")],
        "the time of one update": [("seconds / done\n", "seconds\n")],
        "windows for bytes": [("done * config.batch_size * config.length", "done * config.length")],
        "the first loss": [("{run.losses[-1]:.3f}{held_out}", "{run.losses[0]:.3f}{held_out}")]}),
    (says_that_the_interpreter_runs, {
        "not": [('if status.mode == "interpreter":', "if False:")],
        "always": [('if status.mode == "interpreter":', "if True:")],
        "of other forms": [('if config.backend == "kernel" and', "if")]}),
    (says_that_it_learned_nothing, {
        "not": [("if nats > 2 * math.log(BYTES):", "if False:")]}),
    (writes_what_the_model_does, {
        "without the prompt": [("sys.stdout.write(a.prompt)", "pass")],
        "without a last new line": [('final=True) + "\\n")', "final=True))")],
        "top_k left out": [("a.top_k, a.top_p,", "None, a.top_p,")],
        "top_p left out": [("a.top_k, a.top_p,", "a.top_k, None,")],
        "temperature left out": [("Sampling(a.temperature", "Sampling(0.8")],
        "one byte too few": [
            ("stream(model, prompt, a.max_new_tokens",
             "stream(model, prompt, max(0, a.max_new_tokens - 1)")],
        "letters for bytes": [
            ("text.text_to_ids(a.prompt)", "torch.tensor([ord(c) for c in a.prompt])")],
        "another seed": [("manual_seed(a.seed)", "manual_seed(a.seed + 1)")]}),
    (the_seed_decides, {
        "one seed for all": [("manual_seed(a.seed)", "manual_seed(0)")],
        "torch's own": [
            ("stream(model, prompt, a.max_new_tokens, sampling)",
             "stream(model, prompt, a.max_new_tokens, Sampling(a.temperature))")],
        "no seed is one seed": [("generator.seed()", "generator.manual_seed(0)")]}),
    (letters_are_never_torn, {
        "byte by byte": [(DECODED, 'bytes(token.tolist()).decode("utf-8", "replace")')],
        "all at the end": [("for token in tokens:", "for token in [torch.cat([*tokens])]:")],
        "not flushed": [("        sys.stdout.flush()\n    sys", "    sys")],
        "half a letter left out": [('decoder.decode(b"", final=True) + "\\n"', '"\\n"')],
        "refused": [('errors="replace"', 'errors="strict"')],
        "left out": [('errors="replace"', 'errors="ignore"')]}),
    (refuses_wrong_settings, {
        "preset before pattern": [
            ("if a.preset is not None and a.pattern is not None:", "if False:")],
        "pattern before pattern": [
            ('if a.pattern is not None and "pattern" in a.set:', "if False:")],
        "unknown names": [("if name not in FIELDS and name not in others:", "if False:")],
        "far names": [("difflib.get_close_matches(name, [*FIELDS, *others], n=1)", "[]")],
        "numbers that are 0": [("v is not None}", "v}")],
        "what is empty": [('if getattr(a, name, None) == "":', "if False:")],
        "without effect": [("    check_fields_are_used(a.set, config)\n", "")],
        "any vocabulary": [('if name == "vocab_size" and name not in others:', "if False:")],
        "any seed": [("and a.seed not in SEEDS:", "and False:")],
        "any device": [("if a.device not in there:", "if False:")],
        "any length": [("training.length > config.max_positions:", "False:")],
        "any size": [("if there is not None and needed > there:", "if False:")],
        "numbers of errors": [("if isinstance(error, OSError) and", "if False and")],
        "status 0": [("    return 1\n", "    return 0\n")],
        "on standard output": [("{lines[0]}\", file=sys.stderr)", '{lines[0]}")')]}),
    (refuses_to_write_nonsense, {
        "status 0": [("    return 1\n", "    return 0\n")],
        "an empty prompt": [("if not a.prompt:", "if False:")],
        "half a letter": [('a.prompt.encode("utf-8")', "pass")],
        "any seed": [("and a.seed not in SEEDS:", "and False:")],
        "more than there are": [("if a.top_k is not None and a.top_k > BYTES:", "if False:")],
        "a choice of one": [("if value is not None and a.temperature == 0:", "if False:")],
        "the prompt first": [
            ("    model = load_model(",
             "    sys.stdout.write(a.prompt)\n    model = load_model(")]}),
    (refuses_to_write_past_the_table, {
        "when it gets there": [("    if written > most:\n", "    if False:\n")],
        "one too few": [("config.max_positions - read + 1", "config.max_positions - read")],
        "one too many": [("config.max_positions - read + 1", "config.max_positions - read + 2")],
        "the prompt alone": [(" or written == 0:", ":")]}),
    (refuses_runs_of_another_kind, {
        "any directory": [("                directory=a.run,\n", "")],
        "the first word too early": [
            ("    torch.manual_seed(training.seed)\n",
             '    say(f"going on from {newest}")\n    torch.manual_seed(training.seed)\n')],
        "any file": [("if (run := Path(a.run)).exists() and not run.is_dir():", "if False:")]}),
    (refuses_wrong_use, {
        "no run will do": [('add("--run", required=True, metavar="DIRECTORY", help="of',
                            'add("--run", default=".", metavar="DIRECTORY", help="of')],
        "any number": [('add("--steps", type=int, help="updates (default 1000, or',
                        'add("--steps", type=str, help="updates (default 1000, or')]}),
    (foresees_memory, {
        "not refused": [("if there is not None and needed > there:", "if False:")],
        "only parameters": [
            ("training_bytes(config, tokens=processes * tokens, processes=processes)",
             "4 * parameters")],
        "of all micro-batches": [
            ("math.ceil(share / n_micro_batches(training, processes))", "share")],
        "too late": [("    _must_fit(config, training, device, n, n_processes, a.parallel)\n", ""),
                     ("    bar = _sho",
                      "    _must_fit(config, training, device, n, n_processes, a.parallel)\n"
                      "    bar = _sho")],
        "not warned of": [("if there is None and needed >= NOTABLE:", "if False:")],
        "always warned of": [("if there is None and needed >= NOTABLE:", "if there is None:")],
        "in torch's words": [('if is_one or "DefaultCPUAllocator" in str(error):', "if is_one:")],
        "without a word": [
            ("_out_of_memory(error) or _left", "_left")]}),
    (helps, {
        "without examples": [
            ('examples:\n  python -m cheems_ref generate --run runs/book --prompt "It was"\n'
             "  python", "")],
        "examples that are wrong": [
            ("train --text book.txt --run runs/llama", "train --text book.txt runs/llama")],
        "wrapped": [
            ("layout = argparse.RawDescriptionHelpFormatter", "layout = argparse.HelpFormatter")],
        "a letter left out": [('    "D": "DGLU",\n', "")],
        "another default": [('"d_state": Field(32', '"d_state": Field(16')],
        "another default of an option": [("windows per update (default 8)", "windows (default 4)")],
        "a field left out": [
            ('"d_private": Field(None, "width of what its experts see; null: d_model / 2", '
             '(("K", {}),)),', "")],
        "presets not named": [("{', '.join(PRESETS)}", "the presets")]}),
    (fields_have_the_effect_that_is_told, {
        "a letter too few": [('(("MGDRHCXKE", {}),)', '(("MGDRHCXE", {}),)')],
        "without its condition": [('(("S", {"position": "conv"}),)', '(("S", {}),)')]}),
])
