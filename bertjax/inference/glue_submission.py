"""ZIP archive for the GLUE server, with one prediction file per task."""

import io
import zipfile
from pathlib import Path

from bertjax.data.finetuning.tables import read_utf8
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import write_atomic

# Number of test examples in each file of a complete submission.
NUM_TEST_EXAMPLES = {
    "CoLA.tsv": 1063,
    "SST-2.tsv": 1821,
    "MRPC.tsv": 1725,
    "STS-B.tsv": 1379,
    "QQP.tsv": 390_965,
    "MNLI-m.tsv": 9796,
    "MNLI-mm.tsv": 9847,
    "QNLI.tsv": 5463,
    "RTE.tsv": 3000,
    "WNLI.tsv": 146,
    "AX.tsv": 1104,
}
_WNLI = "WNLI.tsv"


def write_submission(folder: Path, output: Path, wnli_by_majority: bool, partial: bool) -> list[str]:
    """Packs the prediction files of a folder into a submission archive, and replaces an existing archive.

    With `wnli_by_majority`, the archive contains the majority class for all WNLI examples, as in the paper, instead of
    the folder's file. With `partial`, files or rows may be missing. Returns notes about both for the user.
    """
    contents = {name: read_utf8(folder / name) for name in NUM_TEST_EXAMPLES if (folder / name).is_file()}
    if not contents:
        raise UsageError(f"{folder} has no prediction files such as CoLA.tsv; run `bertjax predict --output {folder}`")
    notes = []
    if wnli_by_majority:
        notes.append(f"{_WNLI}: the majority class, as in the paper; use --own_wnli to pack the folder's file instead")
        rows = (f"{index}\t0\n" for index in range(NUM_TEST_EXAMPLES[_WNLI]))
        contents[_WNLI] = "".join(["index\tprediction\n", *rows])
    problems = [f"{name} is missing" for name in NUM_TEST_EXAMPLES if name not in contents]
    for name, content in contents.items():
        num_rows = sum(bool(row.partition("\t")[2].strip()) for row in content.split("\n")[1:])
        if num_rows != NUM_TEST_EXAMPLES[name]:
            problems.append(f"{name} has {num_rows:,} predictions instead of {NUM_TEST_EXAMPLES[name]:,}")
    if problems and not partial:
        raise BertjaxError(f"incomplete submission: {'; '.join(problems)}; predict the missing tasks, or use --partial")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            # `ZipInfo` has a fixed date, so that equal predictions give identical archives.
            archive.writestr(zipfile.ZipInfo(name), contents[name], zipfile.ZIP_DEFLATED)
    write_atomic(output, buffer.getvalue())
    return [*notes, *(f"incomplete: {problem}" for problem in problems)]
