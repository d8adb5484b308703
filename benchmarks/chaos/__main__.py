"""Runs rows of the table of faults and prints the table.

    PYTHONPATH=. python -m benchmarks.chaos --rows 1,2,7 --short --json FILE

What clients saw is left in --records, one file a row, and judged from there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.chaos import faults, soak
from benchmarks.chaos.record import Record
from benchmarks.local_server import cpu_name

ROWS = {**faults.ROWS, **soak.ROWS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="all", help=f"such as 3,7; there are {', '.join(map(str, ROWS))}")
    parser.add_argument("--short", action="store_true", help="minutes instead of hours")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--records", type=Path, default=Path(tempfile.gettempdir()) / "ppserve-chaos")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and namespaces are ended
    numbers = sorted(ROWS) if flags.rows == "all" else [int(number) for number in flags.rows.split(",")]
    flags.records.mkdir(exist_ok=True)
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    results: dict[str, Any] = {"machine": machine, "short": flags.short, "rows": {}}
    for number in numbers:
        row, begun_s = ROWS[number], time.monotonic()
        try:
            figures = row(Record(flags.records / f"row{number}.jsonl"), flags.short)
        except Exception as error:
            traceback.print_exc()
            figures = {"met": False, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        figures |= {"seconds": round(time.monotonic() - begun_s), "load": round(os.getloadavg()[0], 1)}
        results["rows"][number] = figures
        said = {True: "met", False: "NOT met", None: "skipped"}[figures.get("met")]
        print(f"{number}: {said}  {json.dumps(figures)}", flush=True)
        if flags.json:
            flags.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if all(row.get("met") is not False for row in results["rows"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
