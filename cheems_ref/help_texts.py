"""What the command line says about itself: the texts of `--help`."""

OVERVIEW = """\
Train small language models of the Cheems family, write with them, compare and evaluate them, and
hand them to Hugging Face's transformers; and say what a model of any size will take.

examples:
  python -m cheems_ref train --text book.txt --run runs/book
  python -m cheems_ref generate --run runs/book --prompt "It was"
  python -m cheems_ref compare --run runs/order --row SA=SMAM --row AS=AMSM
  python -m cheems_ref export --run runs/book --to exported/book
  python -m cheems_ref budget --preset cheems-1.3b --context 131072
  python -m cheems_ref evaluate --run runs/book --text book.txt

"python -m cheems_ref train --help" lists the letters of a pattern and the sizes of a model.
"""
TRAIN = """\
Train a language model on a text, byte by byte.

The model is a preset, or a pattern of letters, one for each layer:
{letters}

examples:
  python -m cheems_ref train --text book.txt --run runs/book
  python -m cheems_ref train --text book.txt --run runs/book --steps 2000    (trains on)
  python -m cheems_ref train --text book.txt --run runs/llama --pattern "AM x 4" --steps 500
  python -m cheems_ref train --text book.txt --run runs/big --set d_model=256 --set d_ff=512
  python -m cheems_ref train --run runs/manual            (Python's own manual as the text)

Stop it at any time: Ctrl-C saves first, and after anything worse the last two checkpoints are
there. The same command goes on, and comes to the same losses as a run that was never stopped.
With a larger --steps a run trains on: the losses so far stay what they are, the learning rate
keeps the schedule of the first command and stays at its end. --evaluate-every and
--checkpoint-every may change too; what would change a loss is refused.
"""
SETTINGS = """\
fields of --set, with their defaults (a preset has its own) and the letters that use them:
{fields}
"""
GENERATE = """\
Write on after a prompt, with a model that "train" made.

examples:
  python -m cheems_ref generate --run runs/book --prompt "It was"
  python -m cheems_ref generate --run runs/book --prompt "It was" --temperature 0   (most likely)
  python -m cheems_ref generate --run runs/book --max-new-tokens 2000 --seed 1 > text
"""

COMPARE = """\
Train several models on the same windows in the same order, with several seeds, and say whether they
differ: held-out nats per byte with Student's 95 % interval over the seeds, and the difference to
the first row, taken seed by seed. Where its interval holds zero, no difference is claimed.

A row is NAME=PATTERN, then fields of the model (see "train --help") and learning_rate:
  python -m cheems_ref compare --run runs/s --row conv=SM,position=conv --row rope=SM --seeds 5

The same command goes on after a stop, and rows and seeds can be added; what would change a loss of
a row that is there is refused. Every evaluation is a line in evaluations.jsonl.
"""

BUDGET = """\
Say what a model takes, without making it: parameters, operations and bytes by letter, memory to
write and to train, and how many tokens per second a machine can write at most.

examples:
  python -m cheems_ref budget --preset cheems-1.3b --context 131072
  python -m cheems_ref budget --preset jamba-1.3b --batch 8 --flops 9.9e14 --bandwidth 3.35e12
  python -m cheems_ref budget --pattern "SM x 3 + AM" --set d_model=512 --plot memory.svg
  python -m cheems_ref budget --preset cheems-1.3b --length 2048 --batch 64 --processes 8

Operations are products that are summed. What a pass keeps is what torch keeps on a CPU, of S in its
chunked form; the fused kernels of a GPU keep less. A machine does other things besides, so it
writes fewer tokens per second than those.
"""

EVALUATE = """\
Ask a model that "train" made what it can, with lm-evaluation-harness and without the network.

  cheems_held_out   bits per byte of the text, of which a run's own is held out at its end
  cheems_cloze      which of four continuations is a passage's own (a guess: 0.25)
  cheems_recall     which value belongs to a key, among those of eight pairs (a guess: 0.125)
  cheems_needle     the code in a sentence planted in the text, byte for byte

examples:
  python -m cheems_ref evaluate --run runs/book --text book.txt
  python -m cheems_ref evaluate --run runs/manual --tasks cheems_cloze,cheems_needle --limit 50
  python -m cheems_ref evaluate --run runs/manual --tasks niah_single_1 --limit 10

Of the text of the run only what was held out is asked about, of any other text everything. Also by
name, of RULER: niah_single_1, niah_multikey_2, niah_multikey_3, at 4096 bytes or at --length. For
the papers' tasks, which need data, see "Evaluate it" in the README.

It takes the extra "evaluate": python -m pip install -c constraints.txt -e ".[evaluate]"
"""

EXPORT = """\
Write the model of a run into a folder from which Hugging Face's transformers loads it: weights,
configuration, a tokenizer whose ids are the bytes of a text, a model card, and the file of three
lines that trust_remote_code=True runs.

examples:
  python -m cheems_ref export --run runs/book --to exported/book
  python -m cheems_ref export --run runs/book/step-00000800.safetensors --to exported/early

It takes transformers: pip install "cheems-ref[hub]". Of a run the newest checkpoint is taken; it
may be one of several processes. Nothing is written over: the folder must be new, or empty.
"""
