"""Write the table of docs/elastic.md on what is narrowed, dense or refused, from the tests.

python scripts/support_table.py            write the table
python scripts/support_table.py --check    exit with 1 if it is out of date
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "elastic.md"
START, END = "<!-- support table: python scripts/support_table.py -->", "<!-- end of table -->"


def make_table() -> str:
    """Return the table of all cases."""
    sys.path.insert(0, str(ROOT))
    from tests.nn.support_cases import CASES

    rows = ["| the network has | result |", "|---|---|"]
    return "\n".join([*rows, *(f"| {case.title} | {case.outcome} |" for case in CASES)])


def insert_table(page: str) -> str:
    """Return the page with a new table between its two marks."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"Expected {START} and {END} in {PAGE.name}")
    return f"{before}{START}\n{make_table()}\n{END}{after}"


def main() -> int:
    """Write the table, or check whether it is up to date."""
    page = PAGE.read_text()
    text = insert_table(page)
    if "--check" in sys.argv[1:]:
        problem = f"{PAGE.name} is out of date: run `python scripts/support_table.py`\n"
        sys.stdout.write("" if text == page else problem)
        return 0 if text == page else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
