"""`python -m holdfast`, which is also how torchrun starts it."""

import os

if "RANK" in os.environ:  # before torch is imported: what it logs of lost processes is said in one line
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

from holdfast.cli import main  # noqa: E402

if __name__ == "__main__":
    from holdfast.cli.rank_processes import end_with_parent

    end_with_parent()
    main()
