"""Helpers that write random text and prepare corpora from it."""

import random
import subprocess
import sys

from bertjax.data.corpus import prepare

WORDS = ["river", "stone", "walk", "green", "lamp", "quiet", "seven", "under", "paper", "north"]


def make_text(documents, seed=0):
    draw = random.Random(seed)
    return [
        [
            " ".join(draw.choice(WORDS) for _ in range(draw.randrange(3, 9))) + f" {document}.{i} ."
            for i in range(draw.randrange(1, 8))
        ]
        for document in range(documents)
    ]


def write_text(path, documents):
    path.write_text("\n\n".join("\n".join(sentences) for sentences in documents) + "\n", encoding="utf-8")


def run(folder, *inputs, name="corpus", workers=1, **settings):
    """Prepares the corpus `name` in a local folder or a bucket, and returns its manifest."""
    return prepare.prepare(list(inputs), folder / name, workers=workers, **settings)


def prepare_text(folder, documents, **settings):
    """Prepares a corpus from documents, which are lists of sentences, and returns its manifest."""
    write_text(folder / "a.txt", documents)
    return run(folder, f"text:{folder}/a.txt", **settings)


def documents_of(split):
    """Returns the documents of a split as lists of sentences; a sentence is a tuple of token ids."""
    return [
        [
            tuple(split.tokens[int(split.sentences[s]) : int(split.sentences[s + 1])].tolist())
            for s in range(int(split.documents[d]), int(split.documents[d + 1]))
        ]
        for d in range(split.documents.size - 1)
    ]


def bytes_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def leftovers(tmp_path):
    return sorted(p.name for p in tmp_path.iterdir() if p.is_dir())


def prepare_process(spec, output, vocabulary, *options, **arguments):
    """Starts `bertjax prepare` with two workers."""
    command = [sys.executable, "-m", "bertjax", "prepare", "--input", spec, f"--output={output}"]
    return subprocess.Popen([*command, f"--vocab={vocabulary}", "--workers=2", *options], **arguments)


def children(pid, command=""):
    """Returns the ids of the child processes whose command contains `command`."""
    listing = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listing.stdout.splitlines() if command in line]
