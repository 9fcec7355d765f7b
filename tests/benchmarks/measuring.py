"""Argument parser of the benchmarks, and functions that start processes and time the steps of programs."""

import argparse
import concurrent.futures
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

BERTJAX = (sys.executable, "-m", "bertjax")


def parser_of(document: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help starts with the docstring of a benchmark."""
    return argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)


def run(*command: str) -> tuple[str, float]:
    """Runs a command. Returns its standard output and its run time in seconds."""
    start = time.perf_counter()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return output, time.perf_counter() - start


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a function that runs in a new process, without the process's standard error."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, _discard_stderr) as pool:
        return pool.submit(function, *arguments).result()


def _discard_stderr() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def best_seconds(steps: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Returns the best time of each JAX step in seconds; each round runs all steps, after a round that compiles."""
    import jax

    seconds = dict.fromkeys(steps, math.inf)
    for _ in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def pytorch_step_seconds(
    loss_of: Callable[[], Any], parameters: Iterable[Any], steps: int, dtype: str, **adamw: Any
) -> float:
    """Returns the median seconds of a train step in PyTorch; two warm-up steps do not count.

    A step is a forward and backward pass, clipping of gradients to norm 1, and an AdamW update with weight decay 0.01.
    """
    import torch

    device, parameters = "cuda" if torch.cuda.is_available() else "cpu", [*parameters]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.01, **adamw)
    seconds = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # Wait for the device.
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])
