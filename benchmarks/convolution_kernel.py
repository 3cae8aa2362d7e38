"""Measures the Triton kernels for convolutions of stacked clients against matrix products of patches.

    python benchmarks/convolution_kernel.py --precisions tf32 --out kernel.json   # on a GPU; under 5 minutes
    python benchmarks/convolution_kernel.py --parts step --works cifar-20         # does the package use them?
    python benchmarks/convolution_kernel.py --parts shapes                        # layers of other networks
    python benchmarks/convolution_kernel.py --device cpu          # tiny shapes, Triton's interpreter
    python benchmarks/convolution_kernel.py --device h200         # only compile, for a GPU that is not here

Parts, each with a time limit. equality: the three kernels against torch's convolution of each client. blocks:
which block sizes are fastest; each is checked first. layers: results and gradients of FedCAP's two CIFAR-10
layers, products as the package compiles them against the kernels, captured, by turns, the median. step: whole
steps of the package's program with and without kernels. shapes (only when asked for): layers of other
networks, and what to write into the package's table for them. What is found is written after every line.
Blocks are fixed choices by shape, in holdfast/models/stacked_convolution/blocks.py: bits must not depend on
timing."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LIMITS = {"equality": 75.0, "blocks": 140.0, "layers": 100.0, "step": 200.0, "shapes": 400.0}  # seconds
_USUAL = ["equality", "blocks", "layers", "step"]
_WHOLE = 560.0  # seconds after which the script ends, whatever it does
_PRECISIONS = ("tf32", "bf16", "bf16-activations")
PAYS = 1.3


class Report:
    """Prints lines, and writes what was found after each."""

    def __init__(self, out: Path | None):
        self.out, self.began = out, time.perf_counter()
        self.found: dict[str, Any] = {}

    def say(self, line: str, table: str | None = None, **row: Any) -> None:
        print(line, flush=True)
        if table is not None:
            self.found.setdefault(table, []).append(row)
        self.write()

    def write(self) -> None:
        from holdfast.storage.store import write_json

        self.found["seconds"] = round(time.perf_counter() - self.began, 1)
        if self.out is not None:
            write_json(self.out, self.found)

    def stop_after(self, seconds: float) -> None:
        """End the process then, also while it compiles."""

        def stop() -> None:
            self.say(f"stopped after {seconds:.0f} s; what was found is above", "stopped", seconds=seconds)
            os._exit(3)

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()


class Part:
    """A part of the script. Its items are left out when its time is over, and one that fails stops no
    other."""

    def __init__(self, report: Report, name: str, slow: bool = False):
        self.report, self.name = report, name
        self.limit = 10 * LIMITS[name] if slow else LIMITS[name]
        self.began = time.perf_counter()
        report.say(f"\n{name}")

    def item(self, name: str, work: Callable[[], None]) -> None:
        if time.perf_counter() - self.began > self.limit:
            return self._left_out(name, f"the part's {self.limit:.0f} s are over")
        try:
            work()
        except Exception as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0][:200]
            self._left_out(name, f"{type(error).__name__}: {reason}")

    def _left_out(self, name: str, why: str) -> None:
        self.report.say(f"  {name}: left out ({why})", "left_out", part=self.name, item=name, why=why)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, help="a JSON file")
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu", "h200"))
    options.add_argument("--parts", nargs="*", default=_USUAL, choices=list(LIMITS))
    options.add_argument("--precisions", nargs="*", choices=_PRECISIONS, help="only these")
    options.add_argument("--works", nargs="*", help="only these in part step: cifar-48x20 cifar-20")
    asked = options.parse_args()
    if find_spec("triton") is None:
        sys.exit("Triton is not installed: pip install triton (PyTorch for CUDA brings it along)")
    if asked.device == "cpu":  # read when the kernels are imported
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU: use --device cpu (tiny shapes) or --device h200 (compile only)")
    import triton
    from stacked_convolution.setting import Setting

    report = Report(asked.out)
    report.stop_after(_WHOLE if asked.device == "cuda" else 3600)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else asked.device
    report.found |= {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    report.say(f"{name}, PyTorch {torch.__version__}, Triton {triton.__version__}")
    setting = Setting.of(asked.device)
    if asked.device == "h200":
        from stacked_convolution.builds import build_all

        return build_all(report, setting)
    from stacked_convolution import layers, steps

    setting = setting.only(asked.precisions, asked.works)
    parts = {"equality": layers.equality, "blocks": layers.blocks, "layers": layers.layers}
    parts |= {"step": steps.step, "shapes": layers.shapes}
    for each in LIMITS:
        if each in asked.parts:
            parts[each](Part(report, each, slow=asked.device == "cpu"), setting)
    verdict(report)
    report.say(f"[{report.found['seconds']} s]")


def verdict(report: Report) -> None:
    """Say whether the kernels pay for 960 clients: both layers together, and whole steps."""
    report.say(f"\npays {PAYS}x or more at 960 clients:")
    ratios: dict[str, float] = {}
    for mode in ("tf32", "bf16"):
        wanted = {"mode": mode, "clients": 960}
        rows = [row for row in report.found.get("layers", []) if wanted.items() <= row.items()]
        if len(rows) == 2:
            products, kernels = (
                sum(row["seconds"][form] for row in rows) for form in ("products", "kernels")
            )
            ratios[f"both layers, {mode}"] = products / kernels
    steps = report.found.get("step", [])
    ratios |= {f"whole step, {row['precision']}": row["ratio"] for row in steps if row["clients"] == 960}
    checked = [*report.found.get("equality", []), *steps]
    missed = [row for row in report.found.get("left_out", []) if row["part"] in ("equality", "step")]
    equal = bool(checked) and not missed and all(row["equal"] for row in checked)
    pays = {name: ratio >= PAYS for name, ratio in ratios.items()}
    for name, ratio in ratios.items():
        report.say(f"  {name:36} {ratio:5.2f}x  {'yes' if pays[name] else 'no'}")
    if not ratios:
        report.say("  not decided: this takes 960 clients on a GPU")
    if not equal:
        report.say("  but not all kernels were found equal, or not all were checked: see above")
    report.found["verdict"] = {"pays": pays, "ratios": ratios, "equal": equal}
    report.write()


if __name__ == "__main__":
    main()
