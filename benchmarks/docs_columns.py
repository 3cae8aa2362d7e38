"""Writes the table of metrics in docs/python.md from the glossary.

python -m benchmarks.docs_columns            # writes it
python -m benchmarks.docs_columns --check    # exits with 1 where the page is not current"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from holdfast.evaluation.glossary import GLOSSARY

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
_PLACE = re.compile(r"(<!-- columns: [^\n]*-->\n).*?(<!-- end of columns -->)", re.S)


def current() -> str:
    """The page with the table as the glossary has it."""
    rows = "".join(f"| `{name}` | {text} |\n" for name, text in GLOSSARY.items())
    table = f"| name | meaning |\n|---|---|\n{rows}"
    return _PLACE.sub(lambda found: f"{found[1]}\n{table}\n{found[2]}", PAGE.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return int(PAGE.read_text() != current())
    PAGE.write_text(current())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
