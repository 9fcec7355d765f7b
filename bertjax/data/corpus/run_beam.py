"""A corpus made by Apache Beam, here or on a cluster: the steps of `parts` and `joining`, each on many machines.

Between steps only names and counts pass through the pipeline; text and arrays lie in files of a folder that all its
machines see. So a step that a runner does again or elsewhere finds what was done, and a runner that holds what passes
through it in memory holds little.
"""

import contextlib
import dataclasses
import gc
import hashlib
import io
import itertools
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.pvalue import AsSingleton
from apache_beam.runners.runner import PipelineState, create_runner
from etils import epath

from bertjax.data.corpus import joining, parts, store
from bertjax.data.corpus.encoding import batches
from bertjax.data.corpus.job import Job, Made, spooled
from bertjax.data.corpus.joining import Piece
from bertjax.data.corpus.parts import Chunk, Part, Recipe
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.run_local import worker_lost
from bertjax.data.corpus.tokenizer import VOCABULARY_FILES, load_vocabulary
from bertjax.data.corpus.vocabulary import counted, sample_chars, sampled, vocabulary_of
from bertjax.errors import BertjaxError, UsageError, first_line, listed, shortened
from bertjax.utils.io import is_remote, read_json, write_atomic
from bertjax.utils.process_pool import process_pool

logger = logging.getLogger(__name__)

# Beam's own runner, in processes of this machine. Its name `DirectRunner` stands for one that fetches another program.
_HERE = "FnApiRunner"
_OF_THIS_MACHINE = ("DirectRunner", _HERE)
# Take options that Beam does not know before it has asked them.
_OTHER_OPTIONS = ("PortableRunner", "FlinkRunner", "SparkRunner")
# Beam's own runner gives up when one of its processes is gone; others try a bundle four times.
_ATTEMPTS = 4
_MARK = re.compile(r"bertjax stage (\{.*?\}) ends")
_SAMPLE_CHARS = 4 << 20
# What the pipeline leaves for the machine that started it.
_MERGED, _WRITTEN = "merged.json", "written.json"


def pipeline_options(given: Sequence[str], output: Path | epath.Path, workers: int) -> PipelineOptions:
    """Beam's options of NAME=VALUE, or NAME for a flag; without any, Beam's own runner in processes of this machine.

    Raises:
      UsageError: Beam has no such runner or option, or the runner could not reach the output.
    """
    options = dict(item.removeprefix("--").partition("=")[::2] for item in given)
    runner = options.pop("runner", _HERE)
    flags = [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]
    if runner in _OF_THIS_MACHINE:
        runner = _HERE
        flags = ["--direct_running_mode=multi_processing", f"--direct_num_workers={workers}", *flags]
    try:
        create_runner(runner)
    except (ValueError, ImportError, AttributeError) as error:
        raise UsageError(f"Beam cannot run on runner={runner}: {first_line(error)}") from error
    if runner == "DataflowRunner" and not is_remote(output):
        raise UsageError(f"DataflowRunner cannot write to {output}, a folder of this machine; give --output gs://...")
    made = PipelineOptions([f"--runner={runner}", *flags])
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            unknown = {*made.get_all_options(retain_unknown_options=True)} - {*made.get_all_options()}
    except SystemExit as error:  # Of its parser.
        reason = said.getvalue().strip().rpartition("error: ")[2]
        raise UsageError(f"Beam cannot take --runner_options {' '.join(given)}: {shortened(reason)}") from error
    if unknown and runner not in _OTHER_OPTIONS:
        raise UsageError(f"Beam has no option {listed(sorted(unknown))} for {runner}; its documentation lists them")
    return made


def run(
    job: Job, directory: Path | epath.Path, options: PipelineOptions, workers: int, progress: bool, shard_bytes: int
) -> Made:
    """Makes the files of a corpus in a folder, each array in files of `shard_bytes`.

    The arrays are those that `run_local` makes of the same job, the order of documents included.

    Args:
      directory: that the machines of the pipeline reach by the same name.
      options: from `pipeline_options`.
      workers: processes of this machine, for what is only here.

    Raises:
      UsageError, BertjaxError: a stage failed, or the pipeline; names the stage.
    """
    # What goes wrong is said in one line at the end.
    logging.getLogger("apache_beam").setLevel(logging.CRITICAL)
    work = directory / "work"
    work.mkdir()
    problems = Counter(job.problems)
    with process_pool(workers, worker_lost, gc.disable) as pool:
        sources = [_absolute(spooled(source, work, problems, pool, progress)) for source in job.sources]
    runner = options.view_as(StandardOptions).runner
    if progress:
        logger.info(f"beam: {len(sources):,} inputs, on {runner}")
    for attempt in range(1, _ATTEMPTS + 1):
        pipeline = beam.Pipeline(options=options)
        _build(pipeline, job, sources, directory, work, dict(problems), shard_bytes)
        try:
            state = pipeline.run().wait_until_finish()
        except Exception as error:  # Each runner raises what it likes.
            if found := _MARK.search(str(error)):
                raise _failure(json.loads(found[1])) from error
            reason = first_line(error)
        else:
            if state == PipelineState.DONE:
                break
            reason = f"it ended as {state}"
        if runner != _HERE or attempt == _ATTEMPTS:
            raise BertjaxError(f"Beam's pipeline failed: {reason}; nothing was left at the output")
        if progress:
            logger.info(f"beam: a process was lost ({reason}); what it had not finished is done again")
    made = _made(job, directory, work)
    if is_remote(work):
        work.rmtree()
    else:
        shutil.rmtree(work)
    return made


def _absolute(source: Source) -> Source:
    """The source by a name that is the same wherever a worker runs."""
    if source.kind == "tfds" or is_remote(source.name):
        return source
    return dataclasses.replace(source, name=os.path.abspath(source.name))


class _Stage(beam.DoFn):
    """Calls a function, and says of what goes wrong in it which stage it was: runners tell no more than a text."""

    def __init__(self, name: str, function: Callable[..., Iterable[Any]]) -> None:
        self._name = name
        self._function = function

    def process(self, element: Any, *sides: Any) -> Iterator[Any]:
        try:
            yield from self._function(element, *sides)
        except Exception as error:
            cause = str(error) if isinstance(error, BertjaxError) else f"{type(error).__name__}: {first_line(error)}"
            told = {"stage": self._name, "cause": cause, "usage": isinstance(error, UsageError)}
            raise RuntimeError(f"bertjax stage {json.dumps(told)} ends") from error


def _failure(told: dict[str, Any]) -> BertjaxError:
    kind = UsageError if told["usage"] else BertjaxError
    return kind(f"in stage {told['stage']!r} of Beam's pipeline: {told['cause']}")


def _stage(name: str, function: Callable[..., Iterable[Any]], *sides: Any) -> beam.PTransform:
    return name >> beam.ParDo(_Stage(name, function), *sides)


def _build(
    pipeline: beam.Pipeline,
    job: Job,
    sources: list[Source],
    directory: Path | epath.Path,
    work: Path | epath.Path,
    problems: dict[str, int],
    shard_bytes: int,
) -> None:
    if job.given:
        recipe = Recipe(VOCABULARY_FILES[job.given.kind], job.given.content, job.given.lower_case, job.heldout_share)
        recipes = pipeline | "the vocabulary" >> beam.Create([recipe])
    else:
        recipes = (
            pipeline
            | "heads of inputs" >> beam.Create(_samples(sources, job.vocabulary_kind))
            | "spread heads" >> beam.Reshuffle()
            | _stage("sample", partial(_count, kind=job.vocabulary_kind, lower_case=job.lower_case))
            | "gather samples" >> beam.combiners.ToList()
            | _stage("train the vocabulary", partial(_train, job=job))
        )
    recipe = AsSingleton(recipes)
    small, large, size = parts.chunks_of(sources)
    cut = (
        pipeline
        | "large inputs" >> beam.Create(large)
        | "spread large inputs" >> beam.Reshuffle()
        | _stage("read", partial(parts.cut, work=work, size=size))
    )
    described = (
        (cut, pipeline | "small inputs" >> beam.Create(small))
        | beam.Flatten()
        | "spread chunks" >> beam.Reshuffle()
        | _stage("encode", partial(_encode, work=work), recipe)
        | "gather parts" >> beam.combiners.ToList()
        | _stage("merge", partial(_merge, shard_bytes=shard_bytes, problems=problems, work=work), recipe)
        | "spread pieces" >> beam.Reshuffle()
        | _stage("write", partial(_write, directory=directory))
        | "gather files" >> beam.combiners.ToList()
    )
    _ = described | _stage("finish", partial(_finish, work=work))


def _samples(sources: Sequence[Source], kind: str) -> list[tuple[int, list[tuple[Source, float]]]]:
    """Sources and the characters to sample of each, in groups of enough characters to be worth a call."""
    groups: list[list[tuple[Source, float]]] = [[]]
    gathered = 0.0
    for source, chars in zip(sources, sample_chars(sources, kind), strict=True):
        if gathered >= _SAMPLE_CHARS:
            groups.append([])
            gathered = 0.0
        groups[-1].append((source, chars))
        gathered += chars
    return list(enumerate(groups))


def _count(
    group: tuple[int, list[tuple[Source, float]]], kind: str, lower_case: bool
) -> Iterator[tuple[int, int, Counter[str] | list[str]]]:
    number, heads = group
    texts = itertools.chain.from_iterable(sampled(source, chars) for source, chars in heads)
    for index, batch in enumerate(batches(texts)):
        yield number, index, counted(batch, kind, lower_case)


def _train(samples: list[tuple[int, int, Counter[str] | list[str]]], job: Job) -> Iterator[Recipe]:
    counts = (found for *_, found in sorted(samples, key=lambda sample: sample[:2]))
    content = vocabulary_of(counts, job.vocabulary_kind, job.vocabulary_size, job.lower_case)
    yield Recipe(VOCABULARY_FILES[job.vocabulary_kind], content, job.lower_case, job.heldout_share)


def _encode(chunk: Chunk, recipe: Recipe, work: Path | epath.Path) -> Iterator[tuple[str, Part]]:
    yield chunk.name, parts.encode(chunk, recipe, work)


def _merge(
    found: list[tuple[str, Part]], recipe: Recipe, shard_bytes: int, problems: dict[str, int], work: Path | epath.Path
) -> tuple[Piece, ...]:
    merged = joining.merge(found, recipe, shard_bytes, problems)
    write_atomic(work / recipe.name, recipe.content)
    write_atomic(work / _MERGED, json.dumps({"splits": merged.splits, "problems": merged.problems}))
    return merged.pieces


def _write(piece: Piece, directory: Path | epath.Path) -> Iterator[dict[str, Any]]:
    yield joining.write_piece(piece, directory)


def _finish(files: list[dict[str, Any]], work: Path | epath.Path) -> tuple[()]:
    write_atomic(work / _WRITTEN, json.dumps(files))
    return ()


def _made(job: Job, directory: Path | epath.Path, work: Path | epath.Path) -> Made:
    """What the pipeline left, and the small files beside: the vocabulary, and the checksums of blocks."""
    merged, written = read_json(work / _MERGED), sorted(read_json(work / _WRITTEN), key=lambda file: file["name"])
    vocabulary = job.given
    if vocabulary is None:
        name = VOCABULARY_FILES[job.vocabulary_kind]
        content = (work / name).read_bytes()
        vocabulary = load_vocabulary(Path(name), job.lower_case, content)
    files = {file["name"]: {"bytes": file["bytes"], "sha256": file["sha256"]} for file in written}
    small = {VOCABULARY_FILES[vocabulary.kind]: vocabulary.content}
    shards: Counter[str] = Counter()
    for split in store.SPLITS:
        for array in store.ARRAYS:
            pieces = [file["blocks"] for file in written if file["array"] == f"{split}.{array}"]
            small[store.checksum_file(split, array)] = bytes.fromhex("".join(pieces))
            shards[f"{split}.{array}"] = len(pieces)
    for name, content in small.items():
        write_atomic(directory / name, content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return Made(vocabulary, merged["splits"], Counter(merged["problems"]), files, dict(shards))
