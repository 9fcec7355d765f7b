"""The archive that the GLUE server takes: one file of predictions a task."""

import io
import zipfile
from pathlib import Path

from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import normalize_newlines, reject_utf16, write_atomic

# Every file of a submission, and the rows of its test set.
TEST_ROWS = {
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
_WNLI_MAJORITY = "0"
# So that equal predictions give equal archives.
_DATE = (1980, 1, 1, 0, 0, 0)


def _content(path: Path) -> str:
    data = path.read_bytes()
    reject_utf16(path, data)
    try:
        return normalize_newlines(data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 at byte {error.start}; write it anew with `bertjax predict`") from error


def collect(folder: Path, output: Path, wnli_by_majority: bool, partial: bool) -> list[str]:
    """Packs the prediction files of a folder.

    Args:
      folder: what `bertjax predict` wrote for each task.
      output: the archive, replaced where it is there.
      wnli_by_majority: WNLI's majority class for every example, as in the paper, whatever the folder has.
      partial: an archive that is not whole is made all the same.

    Returns:
      What there is to say of the submission, a line each: what was done about WNLI; files that are missing, or have
      another number of rows than GLUE's test set.

    Raises:
      UsageError: there is no prediction file in the folder.
      BertjaxError: the submission is not whole, which the server does not take, or the archive cannot be written.
    """
    found = {name: folder / name for name in TEST_ROWS if (folder / name).is_file()}
    contents = {name: _content(path) for name, path in found.items()}
    if not contents:
        raise UsageError(
            f"{folder} has none of {', '.join(TEST_ROWS)}; `bertjax predict --output {folder}` writes them"
        )
    said = []
    if wnli_by_majority:
        instead = "in place of the folder's" if _WNLI in contents else "which the folder has not"
        said.append(
            f"{_WNLI}, {instead}: the majority class for all {TEST_ROWS[_WNLI]} rows, as in the paper (--own_wnli "
            "takes the folder's)"
        )
        rows = "".join(f"{index}\t{_WNLI_MAJORITY}\n" for index in range(TEST_ROWS[_WNLI]))
        contents[_WNLI] = "index\tprediction\n" + rows
    problems = [f"{name} is missing" for name in TEST_ROWS if name not in contents]
    for name, content in contents.items():
        rows = len(content.splitlines()) - 1
        if rows != TEST_ROWS[name]:
            problems.append(f"{name} has {rows:,} rows, GLUE's test set has {TEST_ROWS[name]:,}")
    if problems and not partial:
        raise BertjaxError(
            f"the submission is not whole, and GLUE's server takes no other: {'; '.join(problems)}. Predict what "
            "lacks, or give --partial"
        )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            archive.writestr(zipfile.ZipInfo(name, _DATE), contents[name], zipfile.ZIP_DEFLATED)
    write_atomic(output, packed.getvalue())
    return [*said, *(f"incomplete: {problem}" for problem in problems)]
