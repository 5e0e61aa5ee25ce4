"""Mistakes that the properties of test_command_line.py must catch."""

from planting import mistakes
from test_command_line import (
    goes_on_from_where_it_was_stopped,
    hands_on_every_option,
    helps,
    letters_are_never_torn,
    refuses_runs_of_another_kind,
    refuses_to_write_nonsense,
    refuses_wrong_settings,
    refuses_wrong_use,
    says_what_it_does,
    takes_any_model,
    the_bar_is_as_told,
    the_seed_decides,
    writes_what_the_model_does,
)

import cheems_ref.__main__ as command_line

ROOMS = (command_line,)
UNCHECKED = True  # as users have it

DECODED = "decoder.decode(bytes(token.tolist()))"

# fmt: off
MISTAKES = mistakes([
    (says_what_it_does, {
        "nats for bits": [("nats / math.log(2)", "nats")],
        "the update for its loss": [("run.evaluations[-1][1]", "run.evaluations[-1][0]")],
        "letters for bytes": [
            ("ids = text.text_to_ids(text.read_text(a.text))",
             "ids = text.text_to_ids(text.read_text(a.text))[:-20]")],
        "windows for bytes": [("training.batch_size * training.length", "training.batch_size")],
        "another place": [
            ("generate --run {a.run} --prompt", "generate --run {a.text} --prompt")]}),
    (hands_on_every_option, {
        "the seed of the weights left out": [
            ("torch.manual_seed(training.seed)", "torch.manual_seed(0)")],
        "no options": [("if k in names and v is not None})", 'if k == "steps"})')],
        "no checkpoints but the last": [
            ('add("--checkpoint-every", type=int',
             'add("--checkpoint-every", type=lambda n: 99')],
        "float32": [
            ("TrainConfig(**{k: v", 'TrainConfig(**{k: {"bfloat16": "float32"}.get(v, v)')]}),
    (takes_any_model, {
        "numbers as words": [("changes[name] = json.loads(value)", "changes[name] = value")],
        "the vocabulary of the preset": [('changes = {"vocab_size": 256}', "changes = {}")],
        "only the first setting": [("for setting in a.set:", "for setting in a.set[:1]:")],
        "another default": [('a.pattern or "SESESEIE"', 'a.pattern or "SEIE"')],
        "presets left out": [
            ("base = preset(a.preset) if a.preset else ModelConfig", "base = ModelConfig")],
        "words refused": [("changes[name] = value  #", "raise  #")]}),
    (goes_on_from_where_it_was_stopped, {
        "as an error": [("return 130", "return 1")],
        "without a word": [('print("\\nstopped", file=sys.stderr)', "pass")],
        "not caught": [("except KeyboardInterrupt:", "except EOFError:")],
        "nothing said": [('print(f"going on from {newest}")', "pass")],
        "said of a new run": [
            ("if (newest := newest_checkpoint(a.run)) is not None:",
             "if (newest := a.run) is not None:")],
        "nothing saved": [("training, directory=a.run,", "training,")]}),
    (the_bar_is_as_told, {
        "not told": [("bar=a.bar)", "bar=None)")],
        "never by itself": [("bar=a.bar)", "bar=bool(a.bar))")],
        "the wrong way": [("bar=a.bar)", "bar=a.bar if a.bar is None else not a.bar)")]}),
    (writes_what_the_model_does, {
        "without the prompt": [("sys.stdout.write(a.prompt)", "pass")],
        "without a last new line": [('final=True) + "\\n")', "final=True))")],
        "top_k left out": [("a.top_k, a.top_p", "None, a.top_p")],
        "top_p left out": [("a.top_k, a.top_p", "a.top_k, None")],
        "temperature left out": [("Sampling(a.temperature", "Sampling(0.8")],
        "one byte too few": [
            ("prompt, a.max_new_tokens", "prompt, max(0, a.max_new_tokens - 1)")],
        "letters for bytes": [
            ("text.text_to_ids(a.prompt)", "torch.tensor([ord(c) for c in a.prompt])")],
        "another seed": [("manual_seed(a.seed)", "manual_seed(a.seed + 1)")]}),
    (the_seed_decides, {
        "one seed for all": [("manual_seed(a.seed)", "manual_seed(0)")],
        "torch's own": [("a.top_p, generator)", "a.top_p)")],
        "no seed is one seed": [("generator.seed()", "generator.manual_seed(0)")]}),
    (letters_are_never_torn, {
        "byte by byte": [(DECODED, 'bytes(token.tolist()).decode("utf-8", "replace")')],
        "all at the end": [("for token in tokens:", "for token in [torch.cat([*tokens])]:")],
        "not flushed": [("sys.stdout.flush()", "pass")],
        "half a letter left out": [('decoder.decode(b"", final=True) + "\\n"', '"\\n"')],
        "refused": [('errors="replace"', 'errors="strict"')],
        "left out": [('errors="replace"', 'errors="ignore"')]}),
    (refuses_wrong_settings, {
        "preset before pattern": [
            ("if a.preset is not None and a.pattern is not None:", "if False:")],
        "unknown names": [("if not equals or name not in known:", "if not equals:")],
        "numbers that are 0": [("v is not None})", "v})")],
        "status 0": [("        return 1\n", "        return 0\n")],
        "on standard output": [
            ('print(f"cheems_ref: {error}", file=sys.stderr)', 'print(f"cheems_ref: {error}")')]}),
    (refuses_to_write_nonsense, {
        "status 0": [("        return 1\n", "        return 0\n")],
        "an empty prompt": [
            ("text.text_to_ids(a.prompt)", 'text.text_to_ids(a.prompt or "\\n")')]}),
    (refuses_runs_of_another_kind, {
        "any directory": [("training, directory=a.run,", "training,")]}),
    (refuses_wrong_use, {
        "no command will do": [
            ("    commands = parser.add_subparsers(required=True, ",
             "    parser.set_defaults(command=len)\n    commands = parser.add_subparsers(")],
        "any number": [('add("--steps", type=int', 'add("--steps", type=str')]}),
    (helps, {
        "without examples": [
            ("examples:\n  python -m cheems_ref generate --run runs/book --prompt",
             "examples:\n  generate --run runs/book --prompt")],
        "examples that are wrong": [
            ("train --text book.txt --run runs/llama", "train --text book.txt runs/llama")],
        "wrapped": [
            ('p = commands.add_parser("train", help="train a model", description=TRAIN, '
             "formatter_class=raw)",
             'p = commands.add_parser("train", description=TRAIN)')],
        "presets not named": [("{', '.join(PRESETS)}", "the presets")]}),
])
