"""Turns what gpu_check.sh has gathered so far into report.json and report.md.

    python benchmarks/gpu_report.py DIR

Reads DIR/parts.tsv (name, exit status or "skipped", seconds, limit, why skipped), DIR/versions.txt,
DIR/check.log and the bench_*.json and .md beside them. Needs the standard library only: it must
work when the build did not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TIMED_OUT = (124, 137)
LOG_LINES = 40


def read_parts(folder: Path) -> list[dict]:
    parts = []
    for line in (folder / "parts.tsv").read_text(encoding="utf-8").splitlines():
        name, status, seconds, limit, reason = line.split("\t")
        rc = None if status == "skipped" else int(status)
        outcome = "skipped" if rc is None else "passed" if rc == 0 else "FAILED"
        if rc in TIMED_OUT:
            outcome = "TIMED OUT"
        parts.append(
            {
                "name": name,
                "outcome": outcome,
                "rc": rc,
                "seconds": int(seconds),
                "limit_s": int(limit),
                "reason": reason,
            }
        )
    return parts


def log_of(name: str, log: str) -> list[str]:
    """The last lines of a part's output; its begin is marked in the log."""
    _, _, rest = log.partition(f"##### {name}\n")
    return rest.partition("\n##### ")[0].splitlines()[-LOG_LINES:]


def last_line(lines: list[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def to_markdown(report: dict, logs: dict[str, list[str]], tables: list[str]) -> str:
    lines = ["# GPU check", ""]
    lines += [f"- {line}" for line in report["versions"]]
    lines += ["", "| part | outcome | exit | seconds | limit | |", "|---|---|---|---|---|---|"]
    for part in report["parts"]:
        rc = "" if part["rc"] is None else part["rc"]
        note = (part["reason"] or last_line(logs[part["name"]])).replace("|", "\\|")[:160]
        lines.append(
            f"| {part['name']} | {part['outcome']} | {rc} | {part['seconds']} | "
            f"{part['limit_s']} | {note} |"
        )
    for name, bench in report["benchmarks"].items():
        for target in bench.get("targets", []):
            verdict = {True: "pass", False: "FAIL", None: "not judged"}[target["passed"]]
            lines += ["", f"{name}: {target['target']}: {target['measured']}: **{verdict}**"]
    for part in report["parts"]:
        if part["outcome"] in ("FAILED", "TIMED OUT"):
            lines += ["", f"## The end of {part['name']}", "", "```", *logs[part["name"]], "```"]
    return "\n".join([*lines, "", *tables]) + "\n"


def main(folder: Path) -> None:
    log = (folder / "check.log").read_text(encoding="utf-8", errors="replace")
    parts = read_parts(folder)
    logs = {part["name"]: log_of(part["name"], log) for part in parts}
    benchmarks = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("bench_*.json"))
    }
    report = {
        "versions": (folder / "versions.txt").read_text(encoding="utf-8").splitlines(),
        "parts": parts,
        "benchmarks": benchmarks,
    }
    tables = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("bench_*.md"))]
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(to_markdown(report, logs, tables), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
