"""Cache of a frozen encoder's features for training, computed once and stored on the machine's disk."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from filelock import FileLock
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from bertjax.config.mesh import MeshConfig
from bertjax.data.finetuning.batches import inference_batches
from bertjax.data.finetuning.examples import Examples
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import ENCODER, Encoder
from bertjax.model.feature_head import CACHED_FEATURES
from bertjax.model.partitioning import resolve_auto
from bertjax.tasks.finetuning.config import FinetuningConfig
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import saved_fingerprint
from bertjax.training.checkpoint_config import checkpoint_model
from bertjax.training.parameters import load_params_on_host
from bertjax.training.sharding import jit_on_mesh, make_mesh, replicated
from bertjax.utils.io import atomic_file, cache_dir, check_free_space, remove_temporaries, reserve_blocks
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)


def add_cached_features(task: Task, init_from: epath.Path | None) -> None:
    """Adds features of the frozen encoder to the examples of a task with `feature_head.features`.

    If the run has several processes or no initial checkpoint (`init_from` is None), adds no features, and each train
    step runs the frozen encoder.
    """
    if not isinstance(task, FinetuningTask) or init_from is None or jax.process_count() > 1:
        return
    if not task.config.feature_head.features:
        return
    for name in ("train_examples", "eval_examples"):
        examples = getattr(task, name)
        if examples is not None:
            tokens = {**examples.tokens, CACHED_FEATURES: _cached_features(task.config, init_from, examples)}
            setattr(task, name, dataclasses.replace(examples, tokens=tokens))


def _cached_features(config: FinetuningConfig, checkpoint: epath.Path, examples: Examples) -> np.ndarray:
    """Returns memory-mapped features of the examples' tokens, float32 [tokens, layers, D]. Computes them if missing."""
    offsets = examples.offsets
    # Use the dtype of the run, so that cached features equal features computed inside the training step.
    model = resolve_auto(dataclasses.replace(checkpoint_model(checkpoint), dtype=config.model.dtype))
    layers = config.feature_head.layers(model.num_hidden_layers)
    path = cache_dir() / f"features-{_cache_key(checkpoint, model, layers, examples)}.bin"
    shape = int(offsets[-1]), len(layers), model.hidden_size
    num_bytes = 4 * int(np.prod(shape))
    with FileLock(path.parent / f".{path.name}.lock"):
        if path.exists() and _is_complete(path, num_bytes):
            return np.memmap(path, np.float32, "r", shape=shape)
        # Remove partial files of killed runs, which may be tens of gigabytes large.
        remove_temporaries(path.parent, path.name)
        remedy = "set BERTJAX_STAGING to another folder"
        check_free_space(path.parent, num_bytes, "features of the frozen encoder", remedy)
        logger.info(f"caching features of the frozen encoder: {num_bytes / 1e9:,.2f} GB in {path}")
        mesh = make_mesh(MeshConfig())
        encoder = unflatten_dict(load_params_on_host(checkpoint), sep="/")[ENCODER]
        params = jax.device_put(encoder, replicated(mesh))
        hidden_states_of = make_hidden_states_fn(model, params, mesh, layers, max(8, int(np.diff(offsets).max())))
        with atomic_file(path) as unfinished, progress_bar("features", len(offsets) - 1, " texts") as bar:
            features = np.memmap(unfinished, np.float32, "w+", shape=shape)
            reserve_blocks(unfinished)
            for index, states in hidden_states_of(examples):
                features[offsets[index] : offsets[index + 1]] = states
                bar.update()
            features.flush()
            with open(unfinished, "rb+") as file:
                file.write(hashlib.file_digest(file, "sha256").digest())
    return np.memmap(path, np.float32, "r", shape=shape)


def _is_complete(path: Path, num_bytes: int) -> bool:
    """Returns whether a file contains `num_bytes` bytes and their SHA-256. Logs a line if it does not."""
    if path.stat().st_size == num_bytes + hashlib.sha256().digest_size:
        content: Any = np.memmap(path, np.uint8, "r")
        if hashlib.sha256(content[:num_bytes]).digest() == content[num_bytes:].tobytes():
            return True
    logger.info(f"{path} has no valid checksum, so the features are computed again")
    return False


def make_hidden_states_fn(
    config: ModelConfig, params: Any, mesh: Mesh, layers: Sequence[int], seq_len: int
) -> Callable[[Examples], Iterator[tuple[int, np.ndarray]]]:
    """Returns a function that maps examples to an iterator over (sequence index, hidden states), in any order.

    The hidden states of a sequence are float32 [tokens, C, D]. `params` are the parameters of the encoder, on the mesh.
    `layers` are the indices of the C layers: 0 for the embeddings, 1 to N for the layers, -1 for the last layer.
    `seq_len` is the maximum number of tokens per sequence.
    """

    def hidden_states(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        inputs = (batch[name] for name in ("input_ids", "segment_ids", "input_mask"))
        outputs: Any = Encoder(config).apply({"params": params}, *inputs, collect_layers=True)
        return outputs[1][np.array(layers)].transpose(1, 2, 0, 3).astype(np.float32)  # [B, L, C, D]

    run = jit_on_mesh(hidden_states, params, mesh)

    def hidden_states_of(examples: Examples) -> Iterator[tuple[int, np.ndarray]]:
        lengths = np.diff(examples.offsets)
        tokens = {name: examples.tokens[name] for name in ("input_ids", "segment_ids")}
        # Each sequence of a multiple-choice example becomes a row.
        for batch in inference_batches(Examples(examples.offsets, tokens, {}), seq_len):
            for index, states in zip(batch.pop("example"), run(batch), strict=True):
                if index >= 0:
                    yield int(index), states[: lengths[index]]

    return hidden_states_of


def _cache_key(checkpoint: epath.Path, model: ModelConfig, layers: tuple[int, ...], examples: Examples) -> str:
    """Returns a hash of all inputs that determine the features: parameters, architecture, layers and examples."""
    inputs_hash = hashlib.sha256(examples.offsets.tobytes())
    for name in ("input_ids", "segment_ids"):
        inputs_hash.update(examples.tokens[name].tobytes())
    key = {
        "parameters": saved_fingerprint(checkpoint),
        "architecture": vars(model.architecture),
        "dtype": model.dtype,
        "layers": layers,
        "sequences": inputs_hash.hexdigest(),
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
