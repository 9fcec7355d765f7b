"""Text embedders, from training files to exported vectors."""

import dataclasses
import json
import random

import numpy as np
import pytest
from helpers.checkpoints import edit_json
from helpers.command_runs import (
    evaluate,
    load_task,
    overrides,
    predict,
    read_metrics,
    records,
    refused,
    train,
    train_command,
)
from helpers.commanding import printed
from helpers.finetuning_data import WORDS, write_json_lines, write_tsv
from helpers.small_run import load_final_params
from safetensors.numpy import load_file, save_file

import bertjax
from bertjax.cli import main as cli
from bertjax.data.shard import SINGLE_SHARD
from bertjax.tasks.embedding.config import EmbedData
from bertjax.tasks.embedding.evaluation import RankedDocuments, read_eval_sets
from bertjax.tasks.finetuning.splits import evaluated_split
from bertjax.training.checkpoint_config import experiment_config
from bertjax.training.workdir import result_differences

# Documents repeat the topic of their anchor; other words are noise.
TOPICS = [f"{a}{b}" for a in "bdfg" for b in ("pa", "zu", "xo", "qi")]


def text(rng: random.Random, topic: str) -> str:
    return " ".join([topic, *rng.choices(WORDS, k=2)])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a folder with pairs, triplets, scored pairs, classes, teacher scores and a retrieval folder."""
    folder, rng = tmp_path_factory.mktemp("embed"), random.Random(0)
    pairs = [(text(rng, topic), text(rng, topic)) for topic in TOPICS for _ in range(4)]
    write_tsv(folder / "pairs.tsv", ["anchor", "positive"], [[*pair] for pair in pairs])
    lines = [{"q": a, "p": p, "n": [text(rng, rng.choice(TOPICS))][: i % 2]} for i, (a, p) in enumerate(pairs)]
    write_json_lines(folder / "lists.jsonl", lines)
    scored = [[text(rng, a), text(rng, a if i % 2 else TOPICS[0]), str(i % 2)] for i, a in enumerate(TOPICS * 4)]
    write_tsv(folder / "sts.tsv", ["sentence1", "sentence2", "score"], scored)
    write_tsv(folder / "five.tsv", ["sentence1", "sentence2", "score"], [[*row[:2], "5"] for row in scored])
    names = [[*row[:2], ("no", "yes")[int(row[2])]] for row in scored]
    write_tsv(folder / "nli.tsv", ["premise", "hypothesis", "label"], names)
    margins = [[*pair, text(rng, TOPICS[0]), "0.5"] for pair in pairs]
    write_tsv(folder / "margins.tsv", ["anchor", "positive", "negative", "score"], margins)
    beir = folder / "beir"
    (beir / "qrels").mkdir(parents=True)
    for name in ("documents", "queries"):
        rows = ({"_id": f"{name[0]}{i}", "text": text(rng, topic)} for i, topic in enumerate(TOPICS))
        write_json_lines(beir / f"{name.replace('documents', 'corpus')}.jsonl", rows)
    for split, count in (("dev", 16), ("test", 1)):
        rows = [[f"q{i}", f"d{i}", "1"] for i in range(count)]
        write_tsv(beir / f"qrels/{split}.tsv", ["query-id", "corpus-id", "score"], rows)
    return folder


@pytest.fixture(scope="module")
def run(files, letters):
    """Returns the workdir of a finished run; tests must not change it."""
    config = f"embed.py:train={files}/pairs.tsv,dev={files}/sts.tsv,retrieval={files}/beir"
    fields = {"steps": 60, "data.batch_size": 16, "data.query_prompt": "q: ", "embed.dense": 8}
    train(config, files / "run", letters, "--config.optimizer.learning_rate=0.01", **fields)
    return files / "run"


def fine_tune(checkpoint, files, workdir, *arguments):
    """Trains a step with the architecture, pooling and prompts of a checkpoint."""
    config = ["train", f"--config=embed:train={files}/pairs.tsv,quick=true", *overrides(None, steps=1)]
    cli.main([*config, f"--init_from={checkpoint}", f"--workdir={workdir}", "--config.data.seq_len=32", *arguments])


def assert_cosines(file, bert, **options):
    """Checks the first cosines of a file of prediction records."""
    for record in records(file)[:5]:
        first, second = bert.encode([record["text"], record["second_text"]], **options).pooled
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        assert record["cosine"] == pytest.approx(cosine, abs=1e-5)


def test_training_on_pairs_improves_correlation_and_retrieval(run):
    results = json.loads((run / "results.json").read_text())
    before = read_metrics(run)[0]
    for name in ("spearman", "ndcg_at_10"):
        assert results[name] > before[f"eval_{name}"] + 0.1
    assert {"spearman", "pearson", "ndcg_at_10", "recall_at_100"} <= results["baseline"].keys()


@pytest.mark.ci
def test_evaluate_and_predict_use_the_vectors_of_the_run(run, files, tmp_path, capfd):
    results = json.loads((run / "results.json").read_text())
    metrics = evaluate(capfd, run)
    assert metrics["spearman"] == pytest.approx(results["spearman"], abs=1e-6)
    paths = predict(capfd, run, tmp_path / "out", "--split=dev")
    assert [path.name for path in paths] == ["cosines.jsonl", "retrieval.jsonl", "cosines.png"]
    bert = bertjax.load(run)
    assert np.linalg.norm(bert.encode(["ba"]).pooled) == pytest.approx(1)
    assert_cosines(paths[0], bert)  # Scored pairs have no query prompt.
    query, *others = records(paths[1])
    assert len(others) == 15  # `qrels/dev.tsv`, not `test.tsv`
    cosines = [each["cosine"] for each in query["nearest"]]
    assert len(cosines) == 5 and cosines == sorted(cosines, reverse=True)
    assert evaluate(capfd, run, "--split=test").keys() >= {"ndcg_at_10"}  # retrieval needs no test file
    pairs = evaluate(capfd, run, f"--config.data.dev_file={files}/pairs.tsv", "--config.data.retrieval=")
    assert pairs.keys() == {"accuracy_at_1", "accuracy_at_10"} and pairs["accuracy_at_10"] > pairs["accuracy_at_1"]


def test_equal_scores_are_predicted_but_not_evaluated(run, files, tmp_path, capfd):
    options = (f"--config.data.dev_file={files}/five.tsv", "--config.data.retrieval=")
    assert "five.tsv are equal" in refused(capfd, "evaluate", f"--checkpoint={run}", *options)
    path, _ = predict(capfd, run, tmp_path / "out", "--split=dev", *options)
    assert {record["score"] for record in records(path)} == {5.0}


def test_exported_vectors_equal_those_of_sentence_transformers(run, tmp_path, capfd):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["bpa ba ke", "x", "dzu"]
    vectors = bertjax.load(run).encode(texts, prompt="q: ").pooled
    printed(capfd, "convert", run, tmp_path / "folder", "--format=huggingface")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "folder"), device="cpu")
    np.testing.assert_allclose(model.encode(texts, prompt_name="query"), vectors, atol=1e-5)
    np.testing.assert_allclose(bertjax.load(tmp_path / "folder").encode(texts, prompt="q: ").pooled, vectors, atol=1e-6)
    assert model.prompts["query"] == "q: " and model.similarity_fn_name == "cosine"


def test_a_second_run_starts_with_pooling_dense_layer_and_prompts_of_the_first(run, files, tmp_path, capfd):
    fine_tune(run, files, tmp_path / "next", "--config.optimizer.learning_rate=1e-30", "--config.data.batch_size=16")
    first, second = (load_final_params(folder) for folder in (run, tmp_path / "next"))
    np.testing.assert_allclose(first["dense/kernel"], second["dense/kernel"], atol=1e-6)
    saved = json.loads((tmp_path / "next/config.json").read_text())
    assert saved["embed"]["dense"] == 8 and saved["data"]["query_prompt"] == "q: "


def test_scored_pairs_get_the_default_prompt_which_training_keeps(run, files, tmp_path, capfd):
    folder, prompts_file = tmp_path / "published", "config_sentence_transformers.json"
    bertjax.load(run).save(folder, format="huggingface")
    content = json.loads((folder / prompts_file).read_text())
    content |= {"prompts": {"query": "q: ", "sts": "dzu ", "other": "x"}, "default_prompt_name": "sts"}
    (folder / prompts_file).write_text(json.dumps(content))
    options = (f"--config=embed:dev={files}/sts.tsv", "--config.data.seq_len=32", "--config.model.dtype=float32")
    path, _ = predict(capfd, folder, tmp_path / "out", "--split=dev", *options)
    assert_cosines(path, bertjax.load(folder), prompt="dzu ")
    fine_tune(folder, files, tmp_path / "next", "--config.data.batch_size=16")
    assert "ignored prompts of" in capfd.readouterr().err
    bertjax.load(tmp_path / "next").save(tmp_path / "saved", format="huggingface")
    content = json.loads((tmp_path / "saved" / prompts_file).read_text())
    assert content["prompts"] == {"query": "q: ", "document": "", "default": "dzu "}
    assert content["default_prompt_name"] == "default"


def test_a_published_embedder_is_evaluated_with_its_pooling_and_dense_layer(run, files, tmp_path, capfd):
    folder = tmp_path / "published"
    bertjax.load(run).save(folder, format="huggingface")
    edit_json(folder / "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    edit_json(folder / "2_Dense/config.json", activation_function="torch.nn.modules.activation.Tanh", bias=False)
    weights = load_file(folder / "2_Dense/model.safetensors")
    save_file({"linear.weight": weights["linear.weight"]}, folder / "2_Dense/model.safetensors")
    options = (f"--config=embed:dev={files}/sts.tsv", "--config.data.seq_len=32", "--config.model.dtype=float32")
    message = refused(capfd, "evaluate", f"--checkpoint={folder}", *options, "--config.embed.dense=4")
    assert "a dense layer of width 8" in message
    # The layer keeps its activation.
    path, _ = predict(capfd, folder, tmp_path / "out", "--split=dev", *options, "--config.embed.dense=8")
    assert_cosines(path, bertjax.load(folder), prompt="")


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ("train={}/lists.jsonl,columns=q+p+n", {}),
        ("train={}/pairs.tsv+{}/pairs.tsv", {"embed.chunk": 32, "embed.dims": "(16, 4)"}),
        ("train={}/pairs.tsv,loss=gist", {"data.guide": "{}/run"}),
        ("train={}/sts.tsv,loss=cosine", {"embed.pooling": "cls", "embed.normalize": "false"}),
        ("train={}/nli.tsv,scored=premise+hypothesis+label,loss=softmax", {"embed.pooling": "last"}),
        ("train={}/margins.tsv,columns=anchor+positive+negative,loss=margin_mse", {}),
    ],
)
@pytest.mark.slow
def test_each_loss_trains_on_its_files(arguments, fields, files, run, letters, tmp_path):
    fields = {name: str(value).replace("{}", str(files)) for name, value in fields.items()}
    experiment = f"embed.py:{arguments.replace('{}', str(files))}"
    assert train(experiment, tmp_path / "run", letters, steps=2, data__batch_size=32, **fields)["step"] == 2


@pytest.mark.slow
def test_a_sweep_trains_with_a_guide_and_is_resumed(files, run, letters, tmp_path, capfd):
    config = f"embed.py:train={files}/pairs.tsv,dev={files}/sts.tsv,loss=gist"
    fields = {"steps": 1, "data__batch_size": 16, "data__guide": run}
    command = ["sweep", *train_command(config, tmp_path / "sweep", letters, **fields)[1:]]
    for seeds in 1, 2:
        cli.main([*command, "--grid=epochs=1", f"--seeds={seeds}"])
    trials = json.loads((tmp_path / "sweep/sweep.json").read_text())["trials"]
    assert ["score" in trial for trial in trials] == [True, True]


def test_a_stopped_run_continues_with_the_same_batches(files, letters):
    task = load_task(f"embed.py:train={files}/pairs.tsv", letters, data__batch_size=8, epochs=2, steps=0)
    whole, rest = ([*task.train_batches(step, SINGLE_SHARD)] for step in (0, 5))
    assert len(whole) == 16
    np.testing.assert_equal(rest, whole[5:])


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        ("train={}/pairs.tsv", {"grad_accum_steps": 2}, "config.embed.chunk"),
        ("train={}/pairs.tsv", {"embed__chunk": 6}, "must divide"),
        ("train={}/pairs.tsv,loss=gist", {}, "config.data.guide"),
        ("train={}/pairs.tsv,columns=anchor+anchor", {}, "only once"),
        ("train={}/sts.tsv,loss=margin_mse,columns=sentence1+sentence2", {}, "a negative"),
        ("train={}/pairs.tsv", {"data__guide": "{}/run"}, "loss=gist or loss=distill_vectors"),
        ("train={}/pairs.tsv", {"embed__dims": "(32,)"}, "1 to 16"),
        ("train={}/pairs.tsv,loss=cosine", {"embed__hardness": 1.0}, "info_nce"),
        ("dev={}/sts.tsv", {}, "no training data"),
        ("train={}/pairs.tsv", {"data__dev_share": 0.5}, "whole files"),
        ("train={}/five.tsv,loss=cosine", {}, "scores from -1 to 1"),
        ("train={}/sts.tsv,dev={}/sts.tsv,loss=softmax", {}, "sts.tsv has the classes of the training files"),
    ],
)
def test_inconsistent_settings_are_rejected_in_one_line(arguments, fields, message, files, letters, tmp_path, capfd):
    arguments = arguments.replace("{}", str(files))
    fields = {"steps": 1, "data__batch_size": 8, **fields}
    assert message in refused(capfd, *train_command(f"embed.py:{arguments}", tmp_path / "run", letters, **fields))
    assert not (tmp_path / "run").exists()


def test_repeated_rows_are_left_out_of_an_epoch_with_a_note(letters, tmp_path):
    write_tsv(tmp_path / "pairs.tsv", ["anchor", "positive"], [["ke", "lo"]] * 30)
    # The batch is larger than the data.
    task = load_task(f"embed.py:train={tmp_path}/pairs.tsv", letters, data__batch_size=64)
    assert "are left out of each epoch" in " ".join(task.notes)
    assert next(task.train_batches(0, SINGLE_SHARD))["weights"].sum() == 1


def test_pairs_may_lack_negatives(letters, tmp_path):
    rows = [{"a": "ba", "b": "ke", "c": None}, {"a": "lo", "b": "mi"}, {"a": "za", "b": None}, {"a": "a", "c": "b"}]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    task = load_task(f"embed.py:train={tmp_path}/rows.jsonl,columns=a+b+c", letters)
    assert "4 rows read, 2 used" in " ".join(task.notes)


def test_scored_pairs_have_a_score_and_texts(tmp_path):
    file, stats = tmp_path / "dev.tsv", []
    file.write_text("sentence1\tsentence2\tscore\na\tb\t1\nc\t \t0\na\tb\t\n")
    read_eval_sets(EmbedData(dev_file=str(file)), stats, [])
    assert stats[0].used == 2 and stats[0].noted["with an empty text"]["rows"] == 1
    file.write_text("sentence1\tsentence2\tscore\na\tb\t\n")
    with pytest.raises(bertjax.UsageError, match="no rows with a score"):
        read_eval_sets(EmbedData(dev_file=str(file)), [], [])


def test_moved_training_files_do_not_change_the_config_of_a_run():
    def config(file, weight):
        sources = ({"file": file, "weight": weight}, {"file": "b.tsv", "weight": 1.0})
        return dataclasses.asdict(experiment_config("embed:size=tiny", [f"--config.data.sources={sources}"]))

    assert result_differences(config("a.tsv", 2.0), config("moved/a.tsv", 2.0)) == ""
    assert "data.sources" in result_differences(config("a.tsv", 2.0), config("a.tsv", 3.0))


def test_a_retrieval_folder_is_evaluation_data_and_a_training_file_is_not():
    assert evaluated_split(EmbedData(retrieval="beir"), train=False) == "dev"
    with pytest.raises(bertjax.UsageError, match="no evaluation data"):
        evaluated_split(EmbedData(train_file="pairs.tsv"), train=False)


def test_vectors_of_a_guide_are_in_the_batches_and_its_description_is_in_the_data_hash(files, letters):
    config = f"embed.py:train={files}/pairs.tsv,loss=distill_vectors"
    task = load_task(config, letters, data__batch_size=8, data__guide="guide")
    vectors = np.arange(len(task.files[0]) * 2 * 16, dtype=np.float32).reshape(-1, 2, 16)
    hashes = {task.data_hash}
    for scale, description in ((1, "first"), (3, "second"), (2, "second")):
        task.add_guide([scale * vectors], description)
        hashes.add(task.data_hash)
    assert len(hashes) == 3
    _, indices = task._mixed_order.batch(0)
    np.testing.assert_array_equal(next(task.train_batches(0, SINGLE_SHARD))["guide"], 2 * vectors[indices])


def test_a_query_that_is_a_document_does_not_retrieve_it():
    # Texts 0 and 1 are the queries x and y, texts 2 to 4 the documents x, y and z.
    vectors = np.array([[1, 0], [0, 1], [1, 0], [0.6, 0.8], [0.8, 0.6]], np.float32)
    judgments = {"x": {"z": 1, "x": 0}, "y": {"y": 1}}
    metrics = ("accuracy_at_1", "recall_at_100")
    queries, documents = {"x": 0, "y": 1}, {"x": 2, "y": 3, "z": 4}
    ranked = RankedDocuments("beir", metrics, "retrieval.jsonl", queries, documents, judgments, frozenset("x"))
    assert ranked.score(vectors) == {"accuracy_at_1": 1, "recall_at_100": 1}
    nearest = [record["nearest"] for record in ranked.records(vectors, ["x", "y", "x", "y", "z"])]
    assert [[each["id"] for each in documents] for documents in nearest] == [["z", "y"], ["y", "z", "x"]]
    pytest.importorskip("bm25s", reason="needs bm25s: pip install -e '.[retrieval]'")
    texts = ["alpha beta", "gamma", "alpha beta", "gamma", "beta"]
    assert ranked.baseline(texts) == {"accuracy_at_1": 1, "recall_at_100": 1}
