"""Writes the results of ``generation.py`` as Markdown tables."""

from __future__ import annotations

from typing import Any

from benchmarks.timing import cell

MIB = 2**20
Rows = dict[str, dict[str, Any]]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def ratio(row: dict[str, Any]) -> str:
    """Return a row's median divided by the median of native-int8 as text, if both are known."""
    return "" if row["ratio"] is None else f"**{row['ratio']:.2f} x**"


def _generation_cell(row: dict[str, Any]) -> str:
    if "not_offered" in row:
        return f"not offered: {row['not_offered']}"
    parts = [f"{cell(row)} ms", f"{row['tokens_per_s']:.1f} tokens/s", ratio(row)]
    if row["timed_passes"] != row["nfe"]:
        parts.append(f"{row['timed_passes']} of {row['nfe']} passes timed")
    return ", ".join(filter(None, parts))


def _by_contestant(head: list[str], columns: list[Rows], text: Any) -> str:
    """Return a table with a row for each contestant and a column for each entry of ``columns``."""
    return table(
        ["", *head], [[name, *(text(rows[name]) for rows in columns)] for name in columns[0]]
    )


def _generations(size: dict[str, Any]) -> str:
    parts = []
    for batch in dict.fromkeys(scenario["batch"] for scenario in size["scenarios"]):
        chosen = [scenario for scenario in size["scenarios"] if scenario["batch"] == batch]
        head = [f"{scenario['prompt']} given, {scenario['new']} new" for scenario in chosen]
        parts.append(f"### Generation, {size['size']}, batch {batch}, equal NFE\n")
        parts.append(
            _by_contestant(head, [scenario["rows"] for scenario in chosen], _generation_cell)
        )
    return "\n".join(parts)


def _passes(size: dict[str, Any]) -> str:
    def text(row: dict[str, Any]) -> str:
        return (
            f"not offered: {row['not_offered']}"
            if "not_offered" in row
            else f"{cell(row)} {ratio(row)}"
        )

    head = [f"B {p['B']}, T {p['T']}, S {p['S']}, R {p['R']}" for p in size["passes"]]
    return f"### Pass, {size['size']}, ms\n\n" + _by_contestant(
        head, [p["rows"] for p in size["passes"]], text
    )


def _processes(size: dict[str, Any]) -> str:
    """Return a table with a row for each contestant.

    A row contains the memory, the time of the first call, and the agreement with the first
    contestant.
    """
    first = size["scenarios"][0]
    lines = []
    for name, row in first["rows"].items():
        if name not in size["agreement"]:
            lines.append([name, *[""] * 7])
            continue
        weights, agreement = size["about"][name]["weights_bytes"], f"{size['agreement'][name]:.3f}"
        if "not_offered" in row:
            lines.append([name, f"{weights / MIB:.0f}", "", "", "", "", "", agreement])
            continue
        peak, cache, selection = row["peak_rss_bytes"], row["cache_bytes"], row["selection_share"]
        lines.append(
            [
                name,
                f"{weights / MIB:.0f}",
                "" if cache is None else f"{cache / MIB:.1f}",
                f"{peak / MIB:.0f}",
                f"{peak / (weights + (cache or 0)):.2f}",
                f"{row['first_s']:.1f}",
                "" if selection is None else f"{selection:.2%}",
                agreement,
            ]
        )
    title = f"### Processes, {size['size']}, {first['prompt']} given, {first['new']} new, batch {first['batch']}\n\n"
    head = [
        "",
        "weights, MiB",
        "cache, MiB",
        "peak resident, MiB",
        "peak over weights and cache",
        "first call, s",
        "selection",
    ]
    return title + table([*head, "same best token"], lines)


def _settings(size: dict[str, Any]) -> str:
    """Return a table of each contestant's settings: the number of threads, and OMP_WAIT_POLICY.

    The table also contains the time of a pass with all other settings.
    """

    def shown(ms: float | None) -> str:
        return "ended" if ms is None else f"{ms:.1f}"

    rows = [
        [
            name,
            found["chosen"],
            ", ".join(f"{settings}: {shown(ms)}" for settings, ms in found["ms"].items()),
        ]
        for name, found in size["settings"].items()
    ]
    return f"### Settings, {size['size']}: ms of a pass of 64 tokens\n\n" + table(
        ["", "chosen", "tried"], rows
    )


def _demo(rows: Rows) -> str:
    head = ["", "ms a command", "tokens/s", "NFE a command", "exact match", "ratio"]
    lines = [
        [
            name,
            cell(row),
            f"{row['tokens_per_s']:.0f}",
            f"{row['nfe']:.2f}",
            f"{row['right']} of {row['commands']}, {row['right'] / row['commands']:.2%}",
            ratio(row),
        ]
        if "right" in row
        else [name, f"left out: {row['not_offered']}", "", "", "", ""]
        for name, row in rows.items()
    ]
    return "### The demo, each one's own best loop: threshold 0.9\n\n" + table(head, lines)


def markdown(result: dict[str, Any]) -> str:
    """Return a Markdown text with the facts about the measurement and all tables.

    Times are medians (quartiles). A ratio is a median divided by the median of native-int8.
    """
    machine = result["machine"]
    facts = {name: machine[name] for name in ("python", "torch", "onnxruntime")}
    for size in result["sizes"]:
        for about in size["about"].values():
            facts |= about.get("facts", {})
    named = ", ".join(f"{key} {value}" for key, value in facts.items())
    hardware = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.1f} GiB"
    how = f"at most {result['threads']} threads, {result['rounds']} rounds"
    parts = [
        f"`{result['command']}`, {result['date']}, {hardware}, {how}; {named}. Ratios (x) are times over native-int8's."
    ]
    if result["left_out"]:
        parts.append(result["left_out"])
    for size in result["sizes"]:
        parts += [_settings(size), _generations(size), _passes(size), _processes(size)]
    if result["demo"]:
        parts.append(_demo(result["demo"]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"
