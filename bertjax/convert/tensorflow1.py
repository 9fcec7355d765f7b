"""Reader of google-research/bert checkpoints: `bert_config.json`, `vocab.txt` and TensorFlow variables.

Variable names are those of `modeling.py`, `run_pretraining.py`, `run_classifier.py` and `run_squad.py`.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bertjax.convert.arrays import import_params
from bertjax.convert.bert import BERT
from bertjax.convert.portable import PortableCheckpoint, fit_vocabulary, read_vocabulary_file
from bertjax.data.corpus.vocabulary import MAX_WORD_CHARS, Vocabulary
from bertjax.errors import BertjaxError, UsageError, first_line, listed
from bertjax.tasks.finetuning.output_layer import CLASSES, SPANS
from bertjax.utils.json_files import read_object

CONFIG = "bert_config.json"
_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu"}
# Config fields that earlier versions of bertjax wrote. google-research/bert does not have them.
_ACTIVATION, _LABELS, _WORD_LIMIT = "bertjax_activation", "bertjax_labels", "bertjax_max_word_chars"
_TOKEN_EMBEDDINGS = "bert/embeddings/word_embeddings"
# Weight and bias names other than `kernel` and `bias`, keyed by the last part of the layer's name.
_LEAVES = {"LayerNorm": ("gamma", "beta")} | dict.fromkeys(
    ("predictions", "seq_relationship", "classifier", "qa_outputs"), ("output_weights", "output_bias")
)
_SCOPES = {"classifier": "", "qa_outputs": "cls/squad/"}


def variable_name(name: str) -> str:
    """Returns the TensorFlow name of a parameter, derived from its name in transformers."""
    layer, _, leaf = name.rpartition(".")
    scope = _SCOPES.get(layer, re.sub(r"layer/(\d+)", r"layer_\1", layer.replace(".", "/")) + "/")
    if layer.endswith("_embeddings"):
        return scope.removesuffix("/")
    weight, bias = _LEAVES.get(layer.rpartition(".")[2], ("kernel", "bias"))
    return scope + (weight if leaf == "weight" else bias)


def find_prefix(path: Path) -> Path | None:
    """Returns the prefix of the checkpoint at `path`, or None if the path contains no checkpoint.

    `path` is a folder, a prefix such as `DIR/bert_model.ckpt`, or an `.index` file.
    """
    if path.is_dir():
        prefixes = {file.name.removesuffix(".index") for file in path.glob("*.index")}
        if not prefixes:
            return None
        import tensorflow as tf

        latest = ""
        with contextlib.suppress(AttributeError, UnicodeDecodeError):  # The file `checkpoint` is missing or damaged.
            latest = os.path.basename(tf.train.get_checkpoint_state(str(path)).model_checkpoint_path)
        candidates = [latest, "bert_model.ckpt", *(prefixes if len(prefixes) == 1 else ())]
        if match := next((name for name in candidates if name in prefixes), None):
            return path / match
        raise UsageError(
            f"{path} contains {len(prefixes)} checkpoints: {listed(sorted(prefixes))}; use the path of one of them"
        )
    prefix = path.with_suffix("") if path.suffix == ".index" else path
    return prefix if Path(f"{prefix}.index").is_file() else None


def read_vocabulary(folder: Path, lower_case: bool | None = None) -> Vocabulary | None:
    """Returns the vocabulary of a checkpoint's folder, or None if the folder contains no vocabulary."""
    config = read_object(folder / CONFIG, optional=True)
    lower_case = config.get("do_lower_case") if lower_case is None else lower_case
    return read_vocabulary_file(folder, lower_case, config.get(_WORD_LIMIT, MAX_WORD_CHARS))


def training_kind(name: str, shapes: Mapping[str, Sequence[int]]) -> str:
    """Returns the kind of a training variable, such as `adam_m`, or "" for a model variable.

    BERT has no scalar parameters, so scalars are training variables, such as `global_step`. Variables of
    optimizers and moving averages contain the name of a parameter: `PARAMETER/SLOT`, `SCOPE/PARAMETER/SLOT` or
    `SCOPE/PARAMETER`.
    """
    scope, _, inner = name.partition("/")
    if inner in shapes and f"{scope}/{_TOKEN_EMBEDDINGS}" in shapes:
        return f"{scope}/..."
    parts = name.split("/")
    spans = itertools.combinations(range(len(parts)), 2)
    is_training = len(shapes[name]) == 0 or any("/".join(parts[start:end]) in shapes for start, end in spans)
    return parts[-1] if is_training else ""


def read(path: Path, lower_case: bool | None = None) -> PortableCheckpoint:
    """Reads a checkpoint from a folder, or from a path prefix such as `bert_model.ckpt`."""
    import tensorflow as tf

    prefix = find_prefix(path) or path
    config_file = prefix.parent / CONFIG
    tf_config = read_object(config_file)
    activation = str(tf_config.get("hidden_act", "gelu"))
    activation = tf_config.get(_ACTIVATION, _ACTIVATIONS.get(activation, activation))
    config = BERT.model_config({"type_vocab_size": 16, **tf_config}, config_file, hidden_act=activation)
    vocabulary = read_vocabulary(prefix.parent, lower_case)
    vocabulary, config, padding_notes = fit_vocabulary(vocabulary, config, prefix.parent)
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        all_shapes = reader.get_variable_to_shape_map()
        training_kinds = {name: training_kind(name, all_shapes) for name in all_shapes}
        shapes = {name: tuple(shape) for name, shape in all_shapes.items() if not training_kinds[name]}
        kernels = {CLASSES: variable_name("classifier.weight"), SPANS: variable_name("qa_outputs.weight")}
        output_kind = next((kind for kind, kernel in kernels.items() if len(shapes.get(kernel, ())) == 2), "")
        num_outputs = shapes[kernels[output_kind]][0] if output_kind else 0
        table = BERT.parameters(config, output_kind, num_outputs, vocabulary.num_rows if vocabulary else 0)
        params = import_params(table, shapes, reader.get_tensor, str(prefix), variable_name)
    except BertjaxError:
        raise
    except Exception as error:  # Catch all, because TensorFlow's exception types depend on the damage.
        raise BertjaxError(f"cannot read {prefix}: {first_line(error)}; copy it again") from error
    notes = [f"read {prefix.name}", *padding_notes]
    if kinds := sorted({*training_kinds.values()} - {""}):
        notes.append(f"ignored {len(all_shapes) - len(shapes)} variables of the training run: {listed(kinds)}")
    labels: tuple[str, ...] = ()
    # A single output means regression, which has no labels.
    if output_kind == CLASSES and num_outputs > 1:
        labels = tuple(tf_config.get(_LABELS) or (f"LABEL_{index}" for index in range(num_outputs)))
        notes.append("read output_weights as classes of a text; some scripts use this name for tags or several labels")
    return PortableCheckpoint(config, params, vocabulary, output_kind, labels, tuple(notes))
