#!/usr/bin/env bash
# The main job in small: docstrings of the installed libraries -> corpus and vocabulary -> a tiny BERT -> its numbers.
# Usage: launch/demo.sh BIN_DIRECTORY OUTPUT_DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
bertjax="$1/bertjax"
out="$2"

rm -rf "$out"
echo "== 1. Text to a tokenised corpus, with a vocabulary of its own"
"$bertjax" prepare --input docs: --vocab_size 8000 --heldout 0.02 --output "$out/corpus"
echo
echo "== 2. What the model will see"
"$bertjax" inspect --config "experiments/demo.py:corpus=$out/corpus" --rows 1
echo
echo "== 3. Masked-LM and next-sentence pre-training"
"$bertjax" train --config "experiments/demo.py:corpus=$out/corpus" --workdir "$out/tiny" > /dev/null
echo
echo "== 4. Fill in the [MASK]"
"$bertjax" fill --checkpoint "$out/tiny" --top 5 \
  "Returns a tuple of the [MASK] and the value." \
  "If the file does not [MASK], an error is raised." \
  "The [MASK] of the input array must be positive."
echo
echo "== Look at"
echo "  $out/tiny/curves.png       loss and accuracy against tokens seen"
echo "  $out/tiny/metrics.jsonl    the same as numbers"
echo "  $out/corpus/manifest.json  what the corpus was made of"
echo "  $out/tiny/checkpoints      go on from here: the same train command with --init_from $out/tiny and a new --workdir"
