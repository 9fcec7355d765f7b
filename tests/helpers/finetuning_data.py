"""Small synthetic datasets with learnable labels, in the official file formats, and a writer of TFDS datasets."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

WORDS = ("ba", "ke", "lo", "mi", "na", "ro")


def sentence(rng: random.Random, first: str = "") -> str:
    return " ".join([*([first] if first else []), *rng.choices(WORDS, k=rng.randint(1, 6))])


def write_tsv(path: Path, header: list[str], rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in ([header] if header else []) + rows))


def write_json_lines(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_tfds(
    folder: Path, name: str, split: str, rows: list[dict], version: str = "1.0.0", shuffle: bool = True, **features
) -> None:
    """Writes one split of a TFDS dataset `NAME` or `NAME/CONFIG`. Columns that are not in `features` are texts."""
    import tensorflow_datasets as tfds

    name, _, config = name.partition("/")
    tfds.dataset_builders.store_as_tfds_dataset(
        name=name,
        version=version,
        config=config or None,
        data_dir=folder,
        split_datasets={split: list(enumerate(rows))},
        features=tfds.features.FeaturesDict({column: tfds.features.Text() for column in rows[0]} | features),
        disable_shuffling=not shuffle,
    )


def glue_files(folder: Path) -> Path:
    """Writes GLUE's CoLA (no header), RTE (named labels), STS-B (scores), MNLI (two dev and test sets) and AX."""
    rng = random.Random(0)

    def write_pairs(name, count, label_name, label):
        width = 3 if "test" in name else 4  # Test sets have no labels.
        rows = [[str(i), sentence(rng), sentence(rng), label(i)][:width] for i in range(count)]
        write_tsv(folder / f"{name}.tsv", ["index", "sentence1", "sentence2", label_name][:width], rows)

    for split, count in (("train", 64), ("dev", 21)):
        rows = [["x", str(i % 2), "*", sentence(rng, ("pa", "zu")[i % 2])] for i in range(count)]
        write_tsv(folder / f"CoLA/{split}.tsv", [], rows)
    write_tsv(folder / "CoLA/test.tsv", ["index", "sentence"], [[str(i), sentence(rng)] for i in range(9)])
    for split, count in (("train", 32), ("dev", 13), ("test", 7)):
        write_pairs(f"RTE/{split}", count, "label", lambda i: ("entailment", "not_entailment")[i % 2])
        write_pairs(f"STS-B/{split}", count, "score", lambda i: f"{rng.uniform(0, 5):.2f}")
    for split in ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched"):
        count = 11 if "mis" in split else 8
        write_pairs(f"MNLI/{split}", count, "gold_label", lambda i: ("contradiction", "entailment", "neutral")[i % 3])
    rows = [[str(i), sentence(rng), sentence(rng)] for i in range(6)]
    write_tsv(folder / "AX/diagnostic.tsv", ["index", "sentence1", "sentence2"], rows)
    return folder


def squad_files(folder: Path) -> Path:
    """Writes SQuAD files with questions `after WORD?`, whose answer is the next word of the context."""

    def draw(rng: random.Random, is_impossible: bool) -> tuple[list[str], str, str]:
        words = [f"{a}{b}" for a in WORDS for b in "xyz"]
        rng.shuffle(words)
        position = rng.randrange(len(words) - 1)
        return words, f"after {words[position]}?", words[position + 1]

    return _write_squad(folder, "1.1", {"train": 24, "dev": 10}, draw)


def learnable_squad_files(folder: Path, version: str) -> Path:
    """Writes SQuAD files in which the answer is the only word that ends with q; unanswerable contexts have none."""

    def draw(rng: random.Random, is_impossible: bool) -> tuple[list[str], str, str]:
        words = [f"{rng.choice(WORDS)}{rng.choice('xy')}" for _ in range(8)]
        answer = ""
        if not is_impossible:
            answer = f"z{rng.choice(WORDS)}q"
            words[rng.randrange(8)] = answer
        return words, "what is it?", answer

    return _write_squad(folder, version, {"train": 64, "dev": 12}, draw)


def _write_squad(folder: Path, version: str, counts: dict[str, int], draw: Callable) -> Path:
    """Writes SQuAD files; `draw` returns the words of the context, the question and the answer."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in counts.items():
        paragraphs = []
        for index in range(count):
            is_impossible = version == "2.0" and index % 3 == 0
            words, question, answer = draw(rng, is_impossible)
            answers = [] if is_impossible else [{"text": answer, "answer_start": " ".join(words).index(answer)}]
            qa = {"id": f"{split}{index}", "question": question, "answers": answers}
            qas = [qa | ({"is_impossible": True} if is_impossible else {})]
            paragraphs.append({"context": " ".join(words), "qas": qas})
        content = {"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]}
        (folder / f"{split}-v{version}.json").write_text(json.dumps(content))
    return folder


def conll_files(folder: Path) -> Path:
    """Writes CoNLL files in which words that start with z are persons."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in (("eng.train", 6), ("eng.testa", 3), ("eng.testb", 2)):
        text = ""
        for _ in range(documents):
            text += "-DOCSTART- -X- O O\n\n"
            for _ in range(4):
                for _ in range(rng.randint(1, 6)):
                    is_person = rng.random() < 0.3
                    text += f"{'za' if is_person else rng.choice(WORDS)} X Y {'I-PER' if is_person else 'O'}\n"
                text += "\n"
        (folder / name).write_text(text)
    return folder


def swag_files(folder: Path) -> Path:
    """Writes SWAG files in which the correct ending starts with zu."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    header = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label"
    for name, count in (("train.csv", 24), ("val.csv", 9), ("test.csv", 5)):
        lines = [header if name != "test.csv" else header.removesuffix(",label")]
        for index in range(count):
            label = rng.randrange(4)
            endings = [sentence(rng, "zu" if choice == label else "pa") for choice in range(4)]
            fields = [str(index), "v", "f", "s", f'"{sentence(rng)}, and"', sentence(rng), "gold", *endings]
            lines.append(",".join([*fields, *([str(label)] if name != "test.csv" else [])]))
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def text_files(folder: Path) -> Path:
    """Writes train.csv, dev.jsonl and test.tsv, in which the first word determines the class."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(sentence(rng, "zu" if index % 2 else "pa"), ("no", "yes")[index % 2]) for index in range(40)]
    (folder / "train.csv").write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows[:24]))
    lines = (json.dumps({"text": text, "label": label}) + "\n" for text, label in rows[24:34])
    (folder / "dev.jsonl").write_text("".join(lines))
    write_tsv(folder / "test.tsv", ["text"], [[text] for text, _ in rows[34:]])
    return folder
