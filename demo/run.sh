#!/usr/bin/env bash
# The main job in small: docstrings of the installed libraries -> corpus and vocabulary -> a tiny BERT -> its numbers,
# and what it is worth on a task.
# Usage: demo/run.sh BIN_DIRECTORY OUTPUT_DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
bertjax="$1/bertjax"
out="$2"
# The second fine-tuning is the program of the first.
export JAX_COMPILATION_CACHE_DIR="$out/compiled" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.2

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
"$bertjax" fill_mask --checkpoint "$out/tiny" --top 5 \
  "Returns a tuple of the [MASK] and the value." \
  "If the file does not [MASK], an error is raised." \
  "The [MASK] of the input array must be positive."
echo
echo "== 5. Fine-tune: which library is a docstring of?"
"$1/python" demo/docstring_labels.py "$out/labels"
text=(--config "experiments/text.py:train=$out/labels/train.tsv,dev=$out/labels/dev.tsv,size=tiny"
  --config.data.seq_len=64 --config.model.dtype=float32 --config.optimizer.learning_rate=3e-4 --config.log_every=125)
"$bertjax" train "${text[@]}" --init_from "$out/tiny" --workdir "$out/libraries" > /dev/null
echo
echo "the same from random parameters:"
"$bertjax" train "${text[@]}" --config.data.vocabulary="$out/corpus/vocab.txt" --workdir "$out/libraries_scratch" \
  > /dev/null
"$1/python" - "$out" <<'PYTHON'
import json, sys
results = [json.load(open(f"{sys.argv[1]}/{name}/results.json")) for name in ("libraries", "libraries_scratch")]
pretrained, scratch = (result["accuracy"] for result in results)
print(f"\naccuracy on dev: {pretrained:.3f} pre-trained, {scratch:.3f} from scratch, "
      f"{results[0]['baseline']['accuracy']:.3f} most frequent label")
PYTHON
echo
echo "== Look at"
echo "  $out/tiny/curves.png       loss and accuracy against tokens seen"
echo "  $out/tiny/metrics.jsonl    the same as numbers"
echo "  $out/corpus/manifest.json  what the corpus was made of"
echo "  $out/tiny/checkpoints      go on from here: the same train command with --init_from $out/tiny and a new --workdir"
