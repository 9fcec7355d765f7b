"""Model card of an upload to the Hugging Face Hub, built from the run's `config.json` and `results.json`."""

from etils import epath

from bertjax.convert.family import MASKED_LM, OUTPUT_KINDS
from bertjax.convert.portable import PortableCheckpoint
from bertjax.training.workdir import CONFIG, DATA, RESULTS
from bertjax.utils import hub
from bertjax.utils.json_files import read_object

# File name of the run's config in the Hub repository.
CONFIG_FILE = "bertjax_config.json"
# Fields of `config.data` that identify the data of a run.
_DATA_FIELDS = ("task", "path", "train_file", "dev_file", "eval_file", "corpus", "eval_split")


def model_card(repository: str, workdir: epath.Path | None, checkpoint: PortableCheckpoint) -> str:
    """Returns the model card of a repository `ORG/NAME` in Markdown.

    `workdir` is None if bertjax did not train the checkpoint.
    """
    # Import here, because most conversions write no model card.
    from huggingface_hub import ModelCardData

    files = (CONFIG, RESULTS, DATA)
    config, results, data = (read_object(workdir / name, optional=True) if workdir else {} for name in files)
    source = (data.get("init_from") or {}).get("source", "")
    pretrained = "fill-mask" if MASKED_LM in checkpoint.modules else "feature-extraction"
    output_kind, library = checkpoint.output_kind, "transformers"
    if checkpoint.embedder and not checkpoint.embedder.refusal:
        library, pretrained = "sentence-transformers", "sentence-similarity"
    header = ModelCardData(
        library_name=library,
        pipeline_tag=OUTPUT_KINDS[output_kind].pipeline if output_kind else pretrained,
        base_model=hub.parse(source)[0] if source else None,
        tags=["bert", "bertjax"],
    )
    name = repository.split("/")[-1]
    sections = [f"# {name}", f"BERT, {checkpoint.size}, {'trained with' if workdir else 'converted by'} bertjax."]
    if config:
        values = {"task": config["task"], **{f"data.{name}": config["data"].get(name) for name in _DATA_FIELDS}}
        values |= {"SHA-256 of the data": results.get("data_sha256"), "steps": results.get("last_step")}
        sections += ["## Task and data", "\n".join(f"- {name}: `{value}`" for name, value in values.items() if value)]
    metrics = {name: value for name, value in results.items() if isinstance(value, float)}
    if metrics:
        baseline = {name: f"{value:.4f}" for name, value in results["baseline"].items()}
        table = ["| metric | value | baseline |", "|---|---|---|"]
        table += [f"| {name} | {value:.4f} | {baseline.get(name, '')} |" for name, value in metrics.items()]
        sections += ["## Results", "Metrics on the run's evaluation data:", "\n".join(table)]
    use = f"bertjax predict --checkpoint {hub.PREFIX}{repository} ..."
    if not output_kind:
        use = f'bert = bertjax.load("{hub.PREFIX}{repository}")'
    sections += ["## Use", f"    {use}"]
    if config:
        start = f" --init_from {source}" if source else ""
        sections += [
            "## Training",
            f"    bertjax train --config {CONFIG_FILE}{start} --workdir runs/{name}",
            f"`{CONFIG_FILE}` in this repository is the config of the run.",
        ]
    return f"---\n{header.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"
