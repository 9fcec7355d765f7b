#!/usr/bin/env bash
# Docstrings of five installed libraries -> corpus and vocabulary -> a tiny BERT -> a classifier from 200 labeled texts.
# Usage: demo/run.sh BIN_DIRECTORY OUTPUT_DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
bertjax="$1/bertjax"
out="$2"
# The second fine-tuning reuses the compiled step of the first.
export JAX_COMPILATION_CACHE_DIR="$out/compiled" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.2

rm -rf "$out"
echo "== 1. Prepare a corpus and train its vocabulary"
"$1/python" demo/docstring_labels.py "$out/labels"
"$bertjax" prepare --input "text:$out/labels/text.txt" --vocab_size 4000 --heldout 0.02 --output "$out/corpus"
echo
echo "== 2. Inspect a training row"
"$bertjax" inspect --config "experiments/demo.py:corpus=$out/corpus" --rows 1
echo
echo "== 3. Pre-train with masked LM and next-sentence prediction"
"$bertjax" train --config "experiments/demo.py:corpus=$out/corpus" --workdir "$out/tiny" > /dev/null
echo
echo "== 4. Predict masked words"
"$bertjax" fill_mask --checkpoint "$out/tiny" --top 5 \
  "Returns a tuple of the [MASK] and the value." \
  "If the file does not [MASK], an error is raised." \
  "The [MASK] of the input array must be positive."
echo
echo "== 5. Fine-tune on 200 labeled docstrings to name the library of a docstring"
text=(--config "experiments/text.py:train=$out/labels/train.tsv,dev=$out/labels/dev.tsv,size=tiny"
  --config.data.train_share=0.05 --config.data.seq_len=64 --config.steps=120 --config.eval_every=60
  --config.optimizer.name=adamw --config.optimizer.learning_rate=3e-4 --config.log_every=60)
"$bertjax" train "${text[@]}" --init_from "$out/tiny" --workdir "$out/libraries" > /dev/null
echo
echo "The same fine-tuning from random parameters:"
"$bertjax" train "${text[@]}" --config.model.position_embedding_type=rotary \
  --config.data.vocabulary="$out/corpus/vocab.txt" --workdir "$out/libraries_scratch" > /dev/null
"$1/python" - "$out" <<'PYTHON'
import json, sys
results = [json.load(open(f"{sys.argv[1]}/{name}/results.json")) for name in ("libraries", "libraries_scratch")]
pretrained, scratch = (result["accuracy"] for result in results)
print(f"\naccuracy on dev: {pretrained:.3f} pre-trained, {scratch:.3f} from scratch, "
      f"{results[0]['baseline']['accuracy']:.3f} most frequent label")
PYTHON
echo
echo "== Output"
echo "  $out/tiny/curves.png       losses and accuracies over tokens seen"
echo "  $out/tiny/metrics.jsonl    the same values as JSON Lines"
echo "  $out/corpus/manifest.json  inputs and sizes of the corpus"
echo "  $out/tiny/checkpoints      checkpoints for --init_from $out/tiny"
