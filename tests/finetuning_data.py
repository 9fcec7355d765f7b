"""Small synthetic datasets with learnable labels, in the official file formats."""

import json
import random
from collections.abc import Callable
from pathlib import Path

WORDS = ("ba", "ke", "lo", "mi", "na", "ro")


def sentence(rng: random.Random, first: str = "") -> str:
    return " ".join([*([first] if first else []), *rng.choices(WORDS, k=rng.randint(1, 6))])


def write_tsv(path: Path, header: list[str], rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in ([header] if header else []) + rows))


def glue_files(folder: Path, seed: int = 0) -> Path:
    """Writes GLUE's CoLA (no header), RTE (named labels), STS-B (scores), MNLI (two dev and test sets) and AX."""
    rng = random.Random(seed)

    def cola_rows(count):
        rows = []
        for index in range(count):
            label = index % 2
            rows.append(["x", str(label), "*", sentence(rng, "zu" if label else "pa")])
        return rows

    write_tsv(folder / "CoLA/train.tsv", [], cola_rows(64))
    write_tsv(folder / "CoLA/dev.tsv", [], cola_rows(21))
    write_tsv(folder / "CoLA/test.tsv", ["index", "sentence"], [[str(i), sentence(rng)] for i in range(9)])
    for split, count in (("train", 32), ("dev", 13), ("test", 7)):
        labels = [["entailment"], ["not_entailment"]] if split != "test" else [[], []]
        rows = [[str(i), sentence(rng), sentence(rng), *labels[i % 2]] for i in range(count)]
        write_tsv(folder / f"RTE/{split}.tsv", ["index", "sentence1", "sentence2", *["label"][: len(labels[0])]], rows)
        score = [] if split == "test" else ["score"]
        rows = [
            [str(i), sentence(rng), sentence(rng), *[f"{rng.uniform(0, 5):.2f}"][: len(score)]] for i in range(count)
        ]
        write_tsv(folder / f"STS-B/{split}.tsv", ["index", "sentence1", "sentence2", *score], rows)
    names = ("contradiction", "entailment", "neutral")
    for split in ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched"):
        is_labeled = not split.startswith("test")
        count = 11 if "mis" in split else 8
        rows = [[str(i), sentence(rng), sentence(rng), *([names[i % 3]] if is_labeled else [])] for i in range(count)]
        header = ["index", "sentence1", "sentence2", *(["gold_label"] if is_labeled else [])]
        write_tsv(folder / f"MNLI/{split}.tsv", header, rows)
    write_tsv(
        folder / "AX/diagnostic.tsv",
        ["index", "sentence1", "sentence2"],
        [[str(i), sentence(rng), sentence(rng)] for i in range(6)],
    )
    return folder


def squad_files(folder: Path, version: str = "1.1", seed: int = 0) -> Path:
    """Writes SQuAD files with questions `after WORD?`, whose answer is the next word of the context."""

    def draw(rng: random.Random, is_impossible: bool) -> tuple[list[str], str, str]:
        words = [f"{a}{b}" for a in WORDS for b in "xyz"]
        rng.shuffle(words)
        position = rng.randrange(len(words) - 1)
        return words, f"after {'qq' if is_impossible else words[position]}?", words[position + 1]

    return _write_squad(folder, version, seed, {"train": 24, "dev": 10}, draw)


def learnable_squad_files(folder: Path, version: str = "1.1", seed: int = 0) -> Path:
    """Writes SQuAD files in which the answer is the only word that ends with q; unanswerable contexts have none."""

    def draw(rng: random.Random, is_impossible: bool) -> tuple[list[str], str, str]:
        words = [f"{rng.choice(WORDS)}{rng.choice('xy')}" for _ in range(8)]
        answer = ""
        if not is_impossible:
            answer = f"z{rng.choice(WORDS)}q"
            words[rng.randrange(8)] = answer
        return words, "what is it?", answer

    return _write_squad(folder, version, seed, {"train": 64, "dev": 12}, draw)


def _write_squad(folder: Path, version: str, seed: int, counts: dict[str, int], draw: Callable) -> Path:
    """Writes SQuAD files; `draw` returns the words of the context, the question and the answer."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in counts.items():
        paragraphs = []
        for index in range(count):
            is_impossible = version == "2.0" and index % 3 == 0
            words, question, answer = draw(rng, is_impossible)
            qa = {"id": f"{split}{index}", "question": question, "answers": []}
            if is_impossible:
                qa["is_impossible"] = True
            else:
                qa["answers"] = [{"text": answer, "answer_start": " ".join(words).index(answer)}]
            paragraphs.append({"context": " ".join(words), "qas": [qa]})
        content = {"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]}
        (folder / f"{split}-v{version}.json").write_text(json.dumps(content))
    return folder


def conll_files(folder: Path, seed: int = 0) -> Path:
    """Writes CoNLL files in which words that start with z are persons."""
    rng = random.Random(seed)
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


def swag_files(folder: Path, seed: int = 0) -> Path:
    """Writes SWAG files in which the correct ending starts with zu."""
    rng = random.Random(seed)
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


def text_files(folder: Path, seed: int = 0) -> Path:
    """Writes train.csv, dev.jsonl and test.tsv, in which the first word determines the class."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(sentence(rng, "zu" if index % 2 else "pa"), ("no", "yes")[index % 2]) for index in range(40)]
    (folder / "train.csv").write_text("text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows[:24]))
    lines = (json.dumps({"text": text, "label": label}) + "\n" for text, label in rows[24:34])
    (folder / "dev.jsonl").write_text("".join(lines))
    write_tsv(folder / "test.tsv", ["text"], [[text] for text, _ in rows[34:]])
    return folder
