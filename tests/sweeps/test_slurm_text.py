"""What a user asks SLURM for: read, checked, and refused in one line with an example."""

from __future__ import annotations

import pytest

from holdfast.core.errors import ConfigError
from holdfast.sweeps.slurm_text import EXAMPLE, SlurmRequest, read_minutes, read_request


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("02:00:00", 120),
        ("1-00:00:00", 1440),
        ("2-12", 3600),
        ("1-01:30", 1530),
        ("10:00", 10),
        ("0:30", 1),
        ("00:10:01", 11),
    ],
)
def test_times_are_read_as_sbatch_reads_them(text: str, minutes: int) -> None:
    assert read_minutes(text) == minutes


def test_settings_are_read_with_the_names_of_sbatch() -> None:
    asked = read_request(
        "--partition=gpu,long gpus=a100:8 cpus-per-task=6 mem=32G exclusive time=1-00:00 jobs=16"
        " setup='module load cuda/12' job-name=table requeues=3"
    )
    assert asked == SlurmRequest(
        minutes=1440,
        gpus=8,
        gpu_type="a100",
        jobs=16,
        cpus=6,
        requeues=3,
        setup="module load cuda/12",
        options={"partition": "gpu,long", "mem": "32G", "exclusive": True, "job_name": "table"},
    )


@pytest.mark.parametrize(
    ("text", "cells", "elements"),
    [
        ("gpus=8 time=5", 20, 8),
        ("gpus=8 time=5", 3, 3),
        ("gpus=2 jobs=6 time=5", 20, 6),
        ("time=5", 20, 1),
        ("jobs=4 time=5", 20, 4),
    ],
)
def test_there_is_one_element_for_each_gpu_and_no_more_than_cells(
    text: str, cells: int, elements: int
) -> None:
    assert read_request(text).elements(cells) == elements


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing is asked for"),
        ("gpus=8", "time is missing"),
        ("time=soon", "time=soon is not a time"),
        ("time=0", "time=0 must be more than nothing"),
        ("partion=gpu time=5", "unknown setting 'partion'; did you mean 'partition'?"),
        ("gpus=x time=5", "gpus=x must be a whole number of at least 0"),
        ("jobs=0 time=5", "jobs=0 must be a whole number of at least 1"),
        ("gpus=8 jobs=2 time=5", "jobs=2 uses only 2 of 8 GPUs"),
        ("gpus=2,time=5", "separate settings by spaces"),
        ("time=5 qos=", "qos needs a value"),
        ("time=5 time=6", "time is given twice"),
        ("time=5 nodes=2", "nodes cannot be set: every element of the array is one process"),
        ("time=5 export=ALL,KEY=x", "export cannot be set: the script holds no variables"),
        ("time=5 comment='a", "a quotation mark has no partner"),
        ("time=5 comment='a\nb'", "the value of comment must be one line"),
    ],
)
def test_a_wrong_text_is_refused_in_one_line_with_an_example(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_request(text)
    assert said in str(error.value) and str(error.value).endswith(f'for example "{EXAMPLE}"')
    assert "\n" not in str(error.value)
