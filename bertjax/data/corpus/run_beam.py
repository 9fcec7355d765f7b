"""Apache Beam runner, on this machine or a cluster. The pipeline stages are the steps of `chunks` and `merge`.

Between stages, the pipeline passes only names, counts, the vocabulary and its training sample. Text and arrays are
stored in a folder that all machines can access. Hence a repeated stage finds the files of its previous attempt, and
runners need little memory.
"""

import contextlib
import dataclasses
import gc
import io
import itertools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.pvalue import AsSingleton
from apache_beam.runners.runner import PipelineState, create_runner
from etils import epath

from bertjax.data.corpus.chunks import Chunk, divide_chunk, encode_chunk, group_sources
from bertjax.data.corpus.documents import batches
from bertjax.data.corpus.merge import MergedArray, plan_merge, write_array
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.run_local import WORKER_DIED, Job, JobResult, spool_docstrings
from bertjax.data.corpus.shards import Shard
from bertjax.data.corpus.vocabulary import MAX_WORD_CHARS, VOCABULARY_FILES, Vocabulary, load_vocabulary
from bertjax.data.corpus.vocabulary_training import read_start, sample_chars, training_data
from bertjax.errors import BertjaxError, UsageError, first_line, listed, shortened
from bertjax.utils.io import AnyPath, is_remote, read_json, write_atomic
from bertjax.utils.process_pool import process_pool

logger = logging.getLogger(__name__)

# Beam's local runner. It replaces `DirectRunner`, which may select Prism, a runner that Beam downloads.
_LOCAL_RUNNER = "FnApiRunner"
# The options of these runners cannot be checked here, because Beam requests them from a job server.
_OPEN_RUNNERS = ("PortableRunner", "FlinkRunner", "SparkRunner")
# Maximum attempts with `FnApiRunner`, which fails if one of its processes dies. Other runners retry by themselves.
_ATTEMPTS = 4
_STAGE_ERROR = re.compile(r"bertjax stage error (\{.*?\}) end")
_SAMPLE_CHARS = 4 << 20
# Files through which the pipeline returns results to `run`.
_PLAN, _FILES, _VOCABULARY, _ADDED_PIECES = "plan.json", "files.json", "vocabulary", "added_pieces.json"


def pipeline_options(options: Sequence[str], output: AnyPath, workers: int) -> PipelineOptions:
    """Parses `NAME=VALUE` and `NAME` items as Beam options.

    The default runner uses `workers` processes of this machine.
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
        raise UsageError(f"DataflowRunner cannot write to {output}, a folder of this machine; use --output gs://...")
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


def run(job: Job, folder: AnyPath, options: PipelineOptions, workers: int) -> JobResult:
    """Writes the arrays of a corpus. They are byte-identical to the arrays of `run_local` for the same job.

    All machines of the pipeline must access `folder` at the same path. `workers` is the number of local processes
    that parse the Python modules of a `docs` source.
    """
    # Silence Beam's logs, because errors are reported in one line at the end.
    logging.getLogger("apache_beam").setLevel(logging.CRITICAL)
    work = folder / "work"
    work.mkdir()
    problems = Counter(job.problems)
    with process_pool(workers, BertjaxError(WORKER_DIED), gc.disable) as pool:
        sources = [_absolute(spool_docstrings(source, work, problems, pool)) for source in job.sources]
    runner = options.view_as(StandardOptions).runner
    logger.info(f"beam: processing {len(sources):,} inputs with {runner}")
    for attempt in range(1, _ATTEMPTS + 1):
        pipeline = beam.Pipeline(options=options)
        _build(pipeline, job, sources, folder, work, dict(problems))
        try:
            state = pipeline.run().wait_until_finish()
        except Exception as error:  # Runners raise different exception types.
            if match := _STAGE_ERROR.search(str(error)):
                raise _stage_error(json.loads(match[1])) from error
            reason = first_line(error)
        else:
            if state == PipelineState.DONE:
                break
            reason = f"it ended in state {state}"
        if runner != _LOCAL_RUNNER or attempt == _ATTEMPTS:
            raise BertjaxError(f"Beam's pipeline failed: {reason}; nothing was written to the output")
        logger.info(f"beam: a process died ({reason}); running the unfinished stages again")
    plan = read_json(work / _PLAN)
    vocabulary, added_pieces = job.vocabulary, None
    if vocabulary is None or job.add_pieces:
        content = (work / _VOCABULARY).read_bytes()
        max_word_chars = job.vocabulary.max_word_chars if job.vocabulary else MAX_WORD_CHARS
        name = VOCABULARY_FILES[job.vocabulary_kind]
        vocabulary = load_vocabulary(name, job.lower_case, content, max_word_chars)
        added_pieces = read_json(work / _ADDED_PIECES)
    result = JobResult(vocabulary, added_pieces, plan["splits"], plan["problems"], dict(read_json(work / _FILES)))
    epath.Path(work).rmtree()
    return result


def _absolute(source: Source) -> Source:
    if source.kind in ("tfds", "hf") or is_remote(source.name):
        return source
    return dataclasses.replace(source, name=os.path.abspath(source.name))


class _Stage(beam.DoFn):
    """DoFn that calls a function, and re-raises an exception as a RuntimeError.

    The message of the RuntimeError contains the stage and the cause, because Beam's runners report only messages.
    """

    def __init__(self, name: str, function: Callable[..., Iterable[Any]]) -> None:
        self._name = name
        self._function = function

    def process(self, element: Any, *side_inputs: Any) -> Iterator[Any]:
        try:
            yield from self._function(element, *side_inputs)
        except Exception as error:
            cause = str(error) if isinstance(error, BertjaxError) else f"{type(error).__name__}: {first_line(error)}"
            fields = {"stage": self._name, "cause": cause, "usage": isinstance(error, UsageError)}
            raise RuntimeError(f"bertjax stage error {json.dumps(fields)} end") from error


def _stage_error(fields: dict[str, Any]) -> BertjaxError:
    error_class = UsageError if fields["usage"] else BertjaxError
    return error_class(f"in stage {fields['stage']!r} of Beam's pipeline: {fields['cause']}")


def _stage(name: str, function: Callable[..., Iterable[Any]], *side_inputs: Any) -> beam.PTransform:
    return name >> beam.ParDo(_Stage(name, function), *side_inputs)


def _build(
    pipeline: beam.Pipeline,
    job: Job,
    sources: list[Source],
    folder: AnyPath,
    work: AnyPath,
    problems: dict[str, int],
) -> None:
    if job.vocabulary and not job.add_pieces:
        vocabularies = pipeline | "vocabulary" >> beam.Create([job.vocabulary])
    else:
        vocabularies = (
            pipeline
            | "starts of inputs" >> beam.Create(_sample_groups(sources, job.vocabulary_kind))
            | "spread starts" >> beam.Reshuffle()
            | _stage("sample", partial(_sample, kind=job.vocabulary_kind, lower_case=job.lower_case))
            | "gather samples" >> beam.combiners.ToList()
            | _stage("train the vocabulary", partial(_train, job=job, work=work))
        )
    vocabulary = AsSingleton(vocabularies)
    small_chunks, large_chunks, chunk_chars = group_sources(sources)
    divided_chunks = (
        pipeline
        | "large inputs" >> beam.Create(large_chunks)
        | "spread large inputs" >> beam.Reshuffle()
        | _stage("read", partial(divide_chunk, work=work, chunk_chars=chunk_chars))
    )
    files = (
        (divided_chunks, pipeline | "small inputs" >> beam.Create(small_chunks))
        | beam.Flatten()
        | "spread chunks" >> beam.Reshuffle()
        | _stage("encode", partial(_encode, work=work), vocabulary)
        | "gather shards" >> beam.combiners.ToList()
        | _stage(
            "merge", partial(_merge, heldout_fraction=job.heldout_fraction, problems=problems, work=work), vocabulary
        )
        | "spread arrays" >> beam.Reshuffle()
        | _stage("write", partial(_write, folder=folder))
        | "gather files" >> beam.combiners.ToList()
    )
    _ = files | _stage("finish", partial(_finish, work=work))


def _sample_groups(sources: Sequence[Source], kind: str) -> list[tuple[int, list[tuple[Source, float]]]]:
    """Returns numbered groups of sources. Each source is paired with the number of characters to sample from it.

    In each group except the last, these numbers add up to at least 4 million characters.
    """
    groups: list[list[tuple[Source, float]]] = [[]]
    group_chars = 0.0
    for source, chars in zip(sources, sample_chars(sources, kind), strict=True):
        if group_chars >= _SAMPLE_CHARS:
            groups.append([])
            group_chars = 0.0
        groups[-1].append((source, chars))
        group_chars += chars
    return list(enumerate(groups))


def _sample(
    group: tuple[int, list[tuple[Source, float]]], kind: str, lower_case: bool
) -> Iterator[tuple[int, int, Counter[str] | list[str]]]:
    number, starts = group
    texts = itertools.chain.from_iterable(read_start(source, chars) for source, chars in starts)
    for index, batch in enumerate(batches(texts)):
        yield number, index, training_data(batch, kind, lower_case)


def _train(samples: list[tuple[int, int, Counter[str] | list[str]]], job: Job, work: AnyPath) -> Iterator[Vocabulary]:
    ordered = (sample for *_, sample in sorted(samples, key=lambda sample: sample[:2]))
    vocabulary, added_pieces = job.learn_vocabulary(ordered)
    write_atomic(work / _ADDED_PIECES, json.dumps(added_pieces))
    yield vocabulary


def _encode(chunk: Chunk, vocabulary: Vocabulary, work: AnyPath) -> Iterator[tuple[str, Shard]]:
    yield chunk.name, encode_chunk(chunk, vocabulary, work)


def _merge(
    named_shards: list[tuple[str, Shard]],
    vocabulary: Vocabulary,
    heldout_fraction: float,
    problems: dict[str, int],
    work: AnyPath,
) -> tuple[MergedArray, ...]:
    shards = [shard for _, shard in sorted(named_shards, key=lambda named: named[0])]
    plan = plan_merge(shards, heldout_fraction, problems)
    write_atomic(work / _VOCABULARY, vocabulary.content)
    write_atomic(work / _PLAN, json.dumps({"splits": plan.splits, "problems": plan.problems}))
    return plan.arrays


def _write(array: MergedArray, folder: AnyPath) -> Iterator[tuple[str, dict[str, Any]]]:
    yield write_array(array, folder)


def _finish(files: list[tuple[str, dict[str, Any]]], work: AnyPath) -> tuple[()]:
    write_atomic(work / _FILES, json.dumps(files))
    return ()
