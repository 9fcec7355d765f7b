"""Argument parser of the benchmarks, and a function that times subprocesses."""

import argparse
import subprocess
import sys
import time

BERTJAX = (sys.executable, "-m", "bertjax")


def parser_of(document: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help starts with the docstring of a benchmark."""
    return argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)


def run(*command: str) -> tuple[str, float]:
    """Runs a command. Returns its standard output and its run time in seconds."""
    start = time.perf_counter()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return output, time.perf_counter() - start
