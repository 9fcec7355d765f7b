"""Export of a checkpoint as one file that runs without bertjax: ONNX, or StableHLO serialized by `jax.export`.

Inputs and outputs are named as in transformers. Inputs are `input_ids`, `attention_mask` and, if the texts of a pair
have different segments, `token_type_ids`. Their shape is [B, L] for any B and L, or [B, C, L] for multiple choice. They
are int64 in ONNX, int32 in StableHLO. Outputs are float32, see `_output_names`.
"""

import dataclasses
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from tokenizers import Tokenizer

from bertjax.convert import huggingface
from bertjax.convert.convert import local_checkpoint, read_checkpoint
from bertjax.convert.family import MASKED_LM, OUTPUT_KINDS
from bertjax.convert.huggingface_tokenizer import write_tokenizer
from bertjax.convert.portable import PortableCheckpoint
from bertjax.data.corpus.tokenizer import prepend_lower_case
from bertjax.data.corpus.vocabulary import TOKENIZER_JSON, VOCABULARY_FILES
from bertjax.errors import BertjaxError, UsageError
from bertjax.model.config import LEFT
from bertjax.model.encoder import ENCODER, Encoder
from bertjax.model.heads import LmHead, mean_states, sequence_states
from bertjax.tasks.embedding.sentence_embedder import SENTENCE, TOKENS, Pooling
from bertjax.tasks.finetuning.output_layer import CHOICES, SPANS
from bertjax.training.sharding import list_devices
from bertjax.utils.io import atomic_file, check_free_space, is_remote, make_output_folder, write_atomic
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray]
Run = Callable[[Arrays], Arrays]
TOKENIZER_SUFFIX = ".tokenizer.json"
# Maximum difference from bertjax's outputs, relative to the larger of 1 and the largest output.
TOLERANCE = 1e-4
# Protocol Buffers (ONNX) and FlatBuffers (`jax.export`) are limited to 2 GiB, of which the graph needs some MiB.
_MAX_BYTES = (1 << 31) - (1 << 26)
_INPUTS, _LOGITS, _STATES = ("input_ids", "attention_mask", "token_type_ids"), "logits", "last_hidden_state"
_SENTENCES = (
    "It rained.",
    "The committee postponed its decision until May, because two of its 12 members had not read the report.",
)
# Texts on which outputs are compared. The last one is longer than ModernBERT's window of local attention.
_TEXTS = (*_SENTENCES, " ".join(_SENTENCES * 7))
# Pooling functions from hidden states [B, L, D] and a batch to [B, D], keyed by mode.
_POOLINGS: dict[str, Callable[..., jax.Array]] = {
    "mean": mean_states,
    "cls": lambda states, batch: states[:, 0],
    "lasttoken": partial(sequence_states, (LEFT,)),
}


def export(source: str, destination: str, overwrite: bool = False) -> None:
    """Exports the checkpoint `source`, a path or Hub address, to FILE.onnx or FILE.stablehlo.

    Also writes its tokenizer to FILE.tokenizer.json. Compares outputs of the file and of bertjax on a few texts. If
    they differ by more than `TOLERANCE`, raises a BertjaxError and writes no file.
    """
    target = Path(destination).expanduser()
    if target.suffix not in _FORMATS or is_remote(destination):
        raise UsageError(f"cannot export to {destination}; use a local FILE{' or FILE'.join(_FORMATS)}")
    if target.is_dir() or (target.exists() and not overwrite):
        raise UsageError(f"{target} exists; choose another file, or use --overwrite to replace a file")
    list_devices()  # Initialize the devices, because Orbax needs them to read checkpoints.
    checkpoint = read_checkpoint(local_checkpoint(source))
    names = _output_names(checkpoint)
    modules = {ENCODER, MASKED_LM} if names == (_LOGITS,) else {ENCODER}
    exported = checkpoint.modules if checkpoint.output_kind else modules
    params = {path: array for path, array in checkpoint.params.items() if path.split("/")[0] in exported}
    engine, tokenizer_file = _make_tokenizer(checkpoint), target.with_suffix(TOKENIZER_SUFFIX)
    if tokenizer_file.exists() and not overwrite and tokenizer_file.read_bytes() != engine.to_str().encode():
        raise UsageError(f"{tokenizer_file} exists and differs; choose another file, or replace it with --overwrite")
    checkpoint = dataclasses.replace(checkpoint, params=params)
    num_bytes = sum(array.nbytes for array in params.values())
    if num_bytes > _MAX_BYTES:
        raise UsageError(f"{source} has {num_bytes:,} bytes; {target.suffix} is limited to 2 GiB; use bertjax convert")
    make_output_folder(target.parent)
    check_free_space(target.parent, num_bytes, str(target))
    bar = progress_bar(f"export {target.name}", len(_TEXTS) + 2, " steps")
    # Set the precision, because GPUs and TPUs multiply float32 matrices with fewer bits by default.
    with bar, atomic_file(target) as file, jax.default_matmul_precision("highest"):
        forward = jax.jit(_make_forward(checkpoint, names))
        expected = [jax.device_get(forward(**_make_inputs(checkpoint, engine, [text]))) for text in _TEXTS]
        run = _FORMATS[target.suffix](checkpoint, names, file)
        bar.update()
        difference = 0.0
        for first, end in [*((index, index + 1) for index in range(len(_TEXTS))), (0, len(_TEXTS))]:
            outputs = run(_make_inputs(checkpoint, engine, _TEXTS[first:end]))
            new_difference = _max_difference(outputs, expected[first:end], checkpoint.output_kind)
            difference = np.maximum(difference, new_difference)
            bar.update()
        if not difference <= TOLERANCE:  # `not <=` is true for NaN
            problem = f"{target.name} is not written: it would differ from bertjax by {difference:.1e}"
            raise BertjaxError(f"{problem}, more than {TOLERANCE:.0e}; use the other format")
        write_atomic(tokenizer_file, engine.to_str())
    logger.info(f"{', '.join(names)}: differs from bertjax by at most {difference:.1e}")


def _max_difference(outputs: Arrays, expected: Sequence[Arrays], kind: str) -> float:
    """Returns the maximum difference (see `TOLERANCE`) of a batch's `outputs` from those `expected` for each text."""
    differences = []
    for index, text_outputs in enumerate(expected):
        for name, array in text_outputs.items():
            # Choices are on the second axis. Outputs of padding tokens do not matter.
            actual = outputs[name][:, index : index + 1] if kind == CHOICES else outputs[name][index : index + 1]
            actual = actual[:, : array.shape[1]]
            differences.append(np.abs(actual - array).max() / max(1, np.abs(array).max()))
    return np.max(differences)


def _output_names(checkpoint: PortableCheckpoint) -> tuple[str, ...]:
    """Returns the output names: logits of the output layer, a sentence vector, masked-LM logits, or hidden states."""
    embedder = checkpoint.embedder
    if checkpoint.output_kind:
        return ("start_logits", "end_logits") if checkpoint.output_kind == SPANS else (_LOGITS,)
    if embedder is None:
        return (_LOGITS,) if MASKED_LM in checkpoint.modules - {*checkpoint.unexported} else (_STATES,)
    if embedder.refusal:
        raise UsageError(f"{embedder.refusal}; export a checkpoint without sentence-transformers modules")
    for pooling in [module for module in embedder.modules if isinstance(module, Pooling)]:
        skips_prompt = not pooling.config.get("include_prompt", True) and any(embedder.prompts.values())
        if skips_prompt or not {*pooling.modes} <= _POOLINGS.keys():
            raise UsageError(f"cannot export the pooling {dict(pooling.config)}; use bertjax convert instead")
    return (SENTENCE,)


def _make_forward(checkpoint: PortableCheckpoint, names: tuple[str, ...]) -> Callable[..., dict[str, jax.Array]]:
    """Returns the function to export, from inputs to outputs. The parameters are constants of the function."""
    config = dataclasses.replace(checkpoint.config, dtype="float32", attention="xla", scan_layers="true")
    params, kind, embedder = unflatten_dict(checkpoint.params, sep="/"), checkpoint.output_kind, checkpoint.embedder

    def forward(input_ids: jax.Array, attention_mask: jax.Array, token_type_ids: Any = None) -> dict[str, jax.Array]:
        segment_ids = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        batch = {"input_ids": input_ids, "input_mask": attention_mask, "segment_ids": segment_ids}
        if kind:
            model = OUTPUT_KINDS[kind].build_model(config, checkpoint.num_outputs)
            logits: Any = model.apply({"params": params}, batch)
            return dict(zip(names, jnp.unstack(logits, axis=-1), strict=True)) if kind == SPANS else {_LOGITS: logits}
        hidden, _ = Encoder(config).apply({"params": params[ENCODER]}, input_ids, segment_ids, attention_mask)
        if embedder is None and names == (_LOGITS,):
            table = params[ENCODER]["embeddings"]["token"]
            scores: Any = LmHead(config).apply({"params": params.get(MASKED_LM, {})}, hidden, table)
            return {_LOGITS: scores[..., : checkpoint.num_rows]}
        features: dict[str, Any] = {TOKENS: hidden}
        for module in embedder.modules if embedder else ():
            if isinstance(module, Pooling):
                pooled = [_POOLINGS[mode](features[TOKENS], batch) for mode in module.modes]
                features[SENTENCE] = jnp.concatenate(pooled, axis=-1)
            else:
                module(features, np.zeros(0), 0)
        return {SENTENCE: features[SENTENCE][:, : embedder.truncate_dim]} if embedder else {_STATES: hidden}

    return forward


def _write_stablehlo(checkpoint: PortableCheckpoint, names: tuple[str, ...], file: Path) -> Run:
    """Writes the model as StableHLO, and returns a function that applies the written model."""
    limit = f"length <= {checkpoint.config.max_row_tokens}"
    shape = jax.export.symbolic_shape(", ".join(_axes(checkpoint)), constraints=[limit])
    inputs = [jax.ShapeDtypeStruct(shape, np.int32)] * len(_input_names(checkpoint))
    function = jax.jit(_make_forward(checkpoint, names))
    exported = jax.export.export(function, platforms=("cpu", "cuda", "rocm", "tpu"))(*inputs)
    file.write_bytes(exported.serialize())
    restored = jax.export.deserialize(bytearray(file.read_bytes()))
    return lambda inputs: jax.device_get(restored.call(*inputs.values()))


def _write_onnx(checkpoint: PortableCheckpoint, names: tuple[str, ...], file: Path) -> Run:
    """Writes an ONNX file with PyTorch's exporter, from the model of transformers or sentence-transformers.

    Removes the arrays from `checkpoint.params` to save memory. Returns a function that applies the written model.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - for torch.onnx
        import sentence_transformers
        import torch
        import transformers
    except ImportError as error:
        raise UsageError(f"ONNX needs the package {error.name}; pip install 'bertjax[onnx]'") from error
    inputs, embedder, axes = _input_names(checkpoint), checkpoint.embedder, dict(enumerate(_axes(checkpoint)))
    for library in (logging.getLogger("torch.onnx"), transformers.utils.logging.get_logger("transformers")):
        library.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="bertjax-") as folder, warnings.catch_warnings(action="ignore"):
        huggingface.write(checkpoint, Path(folder))
        class_name = json.loads(Path(folder, huggingface.CONFIG).read_text())["architectures"][0]
        if not hasattr(transformers, class_name):
            raise UsageError(f"transformers has no {class_name} to export to ONNX; export FILE.stablehlo")
        options = {"attn_implementation": "eager"}  # The exporter does not support all fused kernels.
        if embedder:
            model = sentence_transformers.SentenceTransformer(folder, device="cpu", model_kwargs=options)
        else:
            model = getattr(transformers, class_name).from_pretrained(folder, **options)

        class Module(torch.nn.Module):
            """Model with positional inputs and outputs."""

            model: Any

            def forward(self, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
                batch = dict(zip(inputs, arrays, strict=True))
                outputs = self.model(batch) if embedder else self.model(**batch)
                return tuple(outputs[name][..., : embedder.truncate_dim if embedder else None] for name in names)

        module = Module()
        module.model = model.eval()
        # Use sizes above 1 and separate tensors, because the exporter fixes sizes 0 and 1 and merges shared tensors.
        examples = tuple(torch.ones((2, 3, 11)[-len(axes) :], dtype=torch.long) for _ in inputs)
        torch.onnx.export(
            module,
            examples,
            file,
            input_names=[*inputs],
            output_names=[*names],
            dynamic_shapes=((axes,) * len(inputs),),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def run(batch: Arrays) -> Arrays:
        outputs: Any = session.run(names, {name: array.astype(np.int64) for name, array in batch.items()})
        return dict(zip(names, outputs, strict=True))

    return run


_FORMATS = {".onnx": _write_onnx, ".stablehlo": _write_stablehlo}


def _input_names(checkpoint: PortableCheckpoint) -> tuple[str, ...]:
    return _INPUTS if checkpoint.config.has_pair_segments else _INPUTS[:2]


def _axes(checkpoint: PortableCheckpoint) -> tuple[str, ...]:
    return ("batch", "choices", "length") if checkpoint.output_kind == CHOICES else ("batch", "length")


def _make_tokenizer(checkpoint: PortableCheckpoint) -> Tokenizer:
    """Returns the tokenizer of a checkpoint, which lower-cases, truncates and pads texts as the model needs."""
    vocabulary, embedder = checkpoint.vocabulary, checkpoint.embedder
    with tempfile.TemporaryDirectory(prefix="bertjax-") as folder:
        file = Path(folder, VOCABULARY_FILES[TOKENIZER_JSON])
        notes = write_tokenizer(vocabulary, checkpoint.config, Path(folder))
        if vocabulary is None or not file.exists():
            raise UsageError(f"{notes[0]}; export a checkpoint with a WordPiece vocabulary or a tokenizer.json")
        engine = Tokenizer.from_file(str(file))
    engine.enable_truncation(embedder.max_seq_len if embedder else checkpoint.config.max_row_tokens)
    engine.enable_padding(pad_id=vocabulary.pad_id, pad_token=vocabulary.pieces[vocabulary.pad_id])
    if embedder and embedder.lower_case:
        prepend_lower_case(engine)
    return engine


def _make_inputs(checkpoint: PortableCheckpoint, engine: Tokenizer, texts: Any) -> dict[str, np.ndarray]:
    """Returns the inputs for texts. Segment ids alternate between 0 and 1, so that the check covers segments."""
    rows = engine.encode_batch(list(texts))
    ids, mask = (np.array([getattr(row, name) for row in rows], np.int32) for name in ("ids", "attention_mask"))
    arrays = (ids, mask, mask * (np.arange(ids.shape[1], dtype=np.int32) % 2))
    inputs = dict(zip(_input_names(checkpoint), arrays, strict=False))
    return {name: array[None] for name, array in inputs.items()} if checkpoint.output_kind == CHOICES else inputs
