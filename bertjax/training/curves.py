"""Training and held-out curves of one run, as a picture."""

from typing import Any

from etils import epath

from bertjax.utils.io import atomic_file

# Of metrics that were measured on held-out rows, in `metrics.jsonl`.
HELD_OUT = "eval_"


def draw_curves(lines: list[dict[str, Any]], path: epath.Path, score: str) -> None:
    """Draws losses, and how good a model is, against tokens seen, training thin and held out thick.

    Args:
      lines: objects of `metrics.jsonl`, each with `tokens`.
      path: of the PNG file, replaced at once when the picture is complete.
      score: the metric that tells how good it is; "" draws all accuracies.
    """
    # Imported here: it takes half a second, and the figure needs no screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    # matplotlib's own layouts take as long as all the rest, at each evaluation.
    figure.subplots_adjust(left=0.06, right=0.985, bottom=0.12, top=0.93, wspace=0.16)
    for axes, (title, names) in zip(figure.subplots(1, 2), _panels(lines, score), strict=True):
        for index, name in enumerate(names):
            for key, width, label in (
                (name, 0.8, f"{name}, training"),
                (f"{HELD_OUT}{name}", 2.2, f"{name}, held out"),
            ):
                points = [(line["tokens"] / 1e6, line[key]) for line in lines if isinstance(line.get(key), float)]
                if points:
                    axes.plot(*zip(*points, strict=True), f"C{index}", linewidth=width, label=label)
        axes.set(title=title, xlabel="million tokens seen")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    with atomic_file(path) as here, open(here, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


def _panels(lines: list[dict[str, Any]], score: str) -> list[tuple[str, list[str]]]:
    """Titles, and the metrics that are drawn under each."""
    names = list(dict.fromkeys(name.removeprefix(HELD_OUT) for line in lines for name in line))
    losses = [name for name in names if name == "loss" or name.endswith("_loss")]
    if score:
        return [("Loss", losses), (score.replace("_", " "), [score])]
    return [("Loss", losses), ("Accuracy", [name for name in names if name.endswith("_accuracy")])]
