"""Preparation of a corpus with Apache Beam, on this machine or a cluster. Its stages are the steps of `chunks`.

Between stages, the pipeline passes only names and counts. Text and arrays are stored in a folder that all machines can
access. Hence a repeated stage does not encode finished chunks again, and runners need little memory.
"""

import contextlib
import io
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from operator import attrgetter
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.runner import PipelineState, create_runner
from etils import epath

from bertjax.data.corpus import chunks, store
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.errors import BertjaxError, UsageError, first_line, listed, shortened
from bertjax.utils.io import AnyPath, is_remote, read_json
from bertjax.utils.json_files import write_json

logger = logging.getLogger(__name__)

# Beam's local runner. It replaces `DirectRunner`, which may select Prism, a runner that Beam downloads.
_LOCAL_RUNNER = "FnApiRunner"
# Beam requests the options of these runners from a job server, so they cannot be checked here.
_OPEN_RUNNERS = ("PortableRunner", "FlinkRunner", "SparkRunner")
# Maximum attempts with `FnApiRunner`, which fails if one of its processes dies. Other runners retry by themselves.
_ATTEMPTS = 4
_STAGE_ERROR = re.compile(r"bertjax stage error (\{.*?\}) end")
# File for the manifest entries from `plan_splits`. The manifest entry of an array file NAME is in NAME.json.
_PLAN = "plan.json"


def pipeline_options(options: Sequence[str], output: AnyPath, workers: int) -> PipelineOptions:
    """Parses `NAME=VALUE` and `NAME` items as Beam options.

    The default runner uses `workers` processes on this machine.
    """
    values = {name: value for name, _, value in (item.removeprefix("--").partition("=") for item in options)}
    runner = values.pop("runner", _LOCAL_RUNNER)
    flags = [f"--{name}={value}" if value else f"--{name}" for name, value in values.items()]
    if runner in ("DirectRunner", _LOCAL_RUNNER):
        runner = _LOCAL_RUNNER
        flags = ["--direct_running_mode=multi_processing", f"--direct_num_workers={workers}", *flags]
    try:
        create_runner(runner)
    except (ValueError, ImportError, AttributeError) as error:
        raise UsageError(f"Beam cannot use runner={runner}: {first_line(error)}") from error
    if runner == "DataflowRunner" and not is_remote(output):
        raise UsageError(f"DataflowRunner cannot write to {output}, a local folder; use --output gs://...")
    parsed = PipelineOptions([f"--runner={runner}", *flags])
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            unknown = {*parsed.get_all_options(retain_unknown_options=True)} - {*parsed.get_all_options()}
    except SystemExit as error:  # argparse exits on an invalid option.
        reason = stderr.getvalue().strip().rpartition("error: ")[2]
        raise UsageError(f"Beam rejects --runner_options {' '.join(options)}: {shortened(reason)}") from error
    if unknown and runner not in _OPEN_RUNNERS:
        raise UsageError(f"Beam has no option {listed(sorted(unknown))} for {runner}; see the runner's documentation")
    return parsed


def run(
    sources: Sequence[Source],
    vocabulary: Vocabulary,
    heldout_fraction: float,
    folder: AnyPath,
    _pool: Executor,
    options: PipelineOptions,
) -> dict[str, Any]:
    """Writes the same arrays as `prepare.run_local`, byte for byte, and returns the same manifest entries.

    All machines of the pipeline must access `folder` and the sources at the same paths.
    """
    # Silence Beam's logs, because errors are reported in one line at the end.
    logging.getLogger("apache_beam").setLevel(logging.CRITICAL)
    work = folder / "work"
    work.mkdir()
    inputs, chunk_chars = chunks.group_sources(sources)
    runner = options.view_as(StandardOptions).runner
    logger.info(f"beam: processing {len(sources):,} inputs with {runner}")
    for attempt in range(1, _ATTEMPTS + 1):
        pipeline = beam.Pipeline(options=options)
        _ = (
            pipeline
            | "inputs" >> beam.Create(inputs)
            | "spread inputs" >> beam.Reshuffle()
            | _stage("read", chunks.divide_chunk, work=work, chunk_chars=chunk_chars)
            | "spread chunks" >> beam.Reshuffle()
            | _stage("encode", _encode, vocabulary=vocabulary, work=work)
            | "gather shards" >> beam.combiners.ToList()
            | _stage("merge", _merge, heldout_fraction=heldout_fraction, folder=folder)
            | "spread arrays" >> beam.Reshuffle()
            | _stage("write", _write, folder=folder)
        )
        try:
            state = pipeline.run().wait_until_finish()
        except Exception as error:  # Catch everything, because runners raise different types.
            if match := _STAGE_ERROR.search(str(error)):
                fields = json.loads(match[1])
                error_class = UsageError if fields["usage"] else BertjaxError
                raise error_class(f"in stage {fields['stage']!r} of Beam's pipeline: {fields['cause']}") from error
            reason = first_line(error)
        else:
            if state == PipelineState.DONE:
                break
            reason = f"it ended in state {state}"
        if runner != _LOCAL_RUNNER or attempt == _ATTEMPTS:
            raise BertjaxError(f"Beam's pipeline failed: {reason}; nothing was written to the output")
        logger.info(f"beam: a process died ({reason}); running the unfinished stages again")
    names = [store.array_file(split, array) for split in store.SPLITS for array in store.ARRAYS]
    entries = {**read_json(work / _PLAN), "files": {name: read_json(work / f"{name}.json") for name in names}}
    epath.Path(work).rmtree()
    return entries


def _stage(name: str, function: Callable[..., Iterable[Any]], **arguments: Any) -> beam.PTransform:
    return name >> beam.FlatMap(_run_stage, name, function, **arguments)


def _run_stage(element: Any, name: str, function: Callable[..., Iterable[Any]], **arguments: Any) -> Iterator[Any]:
    """Calls a function, and re-raises an exception as a RuntimeError.

    The message of the RuntimeError contains the stage and the cause, because Beam's runners report only messages.
    """
    try:
        yield from function(element, **arguments)
    except Exception as error:
        cause = str(error) if isinstance(error, BertjaxError) else f"{type(error).__name__}: {first_line(error)}"
        fields = {"stage": name, "cause": cause, "usage": isinstance(error, UsageError)}
        raise RuntimeError(f"bertjax stage error {json.dumps(fields)} end") from error


def _encode(chunk: chunks.Chunk, vocabulary: Vocabulary, work: AnyPath) -> list[chunks.Shard]:
    return [chunks.encode_chunk(chunk, vocabulary, work)]


def _merge(shards: list[chunks.Shard], heldout_fraction: float, folder: AnyPath) -> Iterator[tuple]:
    """Yields the arguments of `write_array` for each array."""
    # Restore the order of the text: paths end with chunk names, whose alphabetical order is the order of the text.
    shards = sorted(shards, key=attrgetter("path"))
    heldout_below, entries = chunks.plan_splits(shards, heldout_fraction)
    write_json(folder / "work" / _PLAN, entries)
    for split, array in itertools.product(store.SPLITS, store.ARRAYS):
        yield split, array, shards, heldout_below


def _write(array: tuple, folder: AnyPath) -> tuple[()]:
    name, entry = chunks.write_array(folder, *array)
    write_json(folder / "work" / f"{name}.json", entry)
    return ()
