"""Data larger than the memory a process may have: decoded, mapped and trained on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.data.folders import encode, write_table

ROWS, SIDE, ALLOWED = (
    50_000,
    64,
    256 << 20,
)  # 614 MB of pixels, and 268 MB for whatever else the process wants

PROGRAM = """
    import json, resource, sys
    from pathlib import Path
    import numpy as np
    import holdfast
    from holdfast.data.federation import load_samples
    from holdfast.data.sources import images
    from holdfast.experiment.config import make_config

    holdfast.run(out=sys.argv[1] + "/warm", train={"rounds": 1, "local_steps": 1}, engine={"plan": "loop", "threads": 1, "workers": 1})
    import pyarrow.parquet, PIL.WebPImagePlugin

    def kilobytes(name):
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name + ":"))

    limit = kilobytes("VmData") * 1024 + ALLOWED
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    decoded, decode = [], images.decode_images
    images.decode_images = lambda *args: decoded.append(1) or decode(*args)
    refused = False
    try:
        np.empty((ROWS, 3, SIDE, SIDE), np.uint8)
    except MemoryError:
        refused = True
    data = {"name": "images", "options": {"folder": sys.argv[1] + "/photos"}, "clients": 50, "partition": {"name": "iid"}}
    run = holdfast.run(
        out=sys.argv[1] + "/run", data=data, model={"name": "mlp", "hidden": 8}, evaluate={"clients": "cohort"},
        train={"rounds": 2, "local_steps": 3, "participation": 0.1}, engine={"plan": "loop", "threads": 1, "workers": 1},
    )
    samples = load_samples(make_config({"data": data}).data)
    print(json.dumps({
        "refused": refused, "rounds": len(run.metrics), "decoded": len(decoded), "bytes": samples.x.numel(), "mean": samples.mean,
        "last": samples.x[-1, 0, 0, 0].item(), "anonymous": kilobytes("RssAnon") * 1024,
    }))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux, which counts a process's own memory"
)
def test_a_round_on_plan_loop_decoding_included(tmp_path: Path) -> None:
    levels = [encode(np.full((SIDE, SIDE, 3), (level, 7, 200), dtype=np.uint8)) for level in range(10)]
    items = [{"bytes": levels[i % 10], "path": None} for i in range(ROWS)]
    for split, part in (("train", items[10:]), ("test", items[:10])):
        write_table(
            tmp_path / "photos" / f"{split}.parquet",
            {"image": part, "label": [i % 10 for i in range(len(part))]},
            rows=5000,
        )
    program = textwrap.dedent(PROGRAM)
    for name in ("ROWS", "SIDE", "ALLOWED"):
        program = program.replace(name, str(globals()[name]))
    # The system's allocator: Arrow's own reserves a gigabyte of addresses, which the limit counts although it
    # is never used.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["refused"]  # the limit is real: the pixels do not fit beside the rest
    assert report["rounds"] >= 2 and report["bytes"] == ROWS * 3 * SIDE * SIDE and report["last"] == 9
    assert report["mean"] == pytest.approx([4.5 / 255, 7 / 255, 200 / 255])
    assert report["anonymous"] < report["bytes"]
    assert (
        report["decoded"] == 1
    )  # the second time the file could be mapped, which the limit would refuse to a private copy
