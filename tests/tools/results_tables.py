"""The figures of localq/data/results.toml and measurements.toml as Markdown tables, and the rates that predictions are
tested against."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from localq.files import catalog
from localq.planner.placement import Placement
from localq.planner.speed import predict

DATA = Path(__file__).parents[2] / "localq/data"
FIT = "by `fit`"

Row = dict[str, Any]


@cache
def data(name: str) -> dict[str, Any]:
    """A file; fractions keep their digits, so that 2.50 is printed as such."""
    with (DATA / name).open("rb") as file:
        return tomllib.load(file, parse_float=Decimal)


def results() -> dict[str, Any]:
    """Figures for readers."""
    return data("results.toml")


def rows(name: str) -> list[Row]:
    """The rows of a table by its columns; "source" is the entry of [sources]."""
    table = results()["tables"][name]
    named = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return [{**row, "source": results()["sources"][row["source"]]} for row in named]


# ---- rates


@dataclass(frozen=True)
class Recorded:
    """A model whose decoding was timed: 128 tokens, random weights, behind a prompt of `depth` tokens."""

    name: str
    head: str
    embed: str
    tok_s: float
    kv_bits: int = 16
    depth: int = 0
    scheme: str = ""  # what the format leaves open


def recorded(row: Row) -> Recorded:
    """A row of the tables "models", "formats" and "planned"."""
    scheme = row.get("scheme", "")
    where = row.get("head", "16"), row.get("embedding", "device")
    return Recorded(row["model"], *where, float(row["tok/s"]), row.get("cache, bits", 16), row.get("prompt", 0), scheme)


def recorded_models() -> list[Recorded]:
    """Each of them once."""
    found = [recorded(row) for name in ("models", "formats", "planned") for row in rows(name) if row["tok/s"]]
    return list(dict.fromkeys(found))


def predicted(model: Recorded) -> float:
    """tok/s by `localq fit` on the card that was measured."""
    name, _, format = model.name.partition("@")
    placement = Placement(model.kv_bits, model.embed, model.head)
    depth = model.depth + predict.LIVE
    rate = predict.tokens_per_s(
        catalog.find(name).arch, format, model.scheme, placement, predict.reference_machine(), depth
    )
    assert rate
    return float(rate)


# ---- tables


def table(name: str) -> str:
    """A table in Markdown, and below it the card, the date and the command of its figures."""
    found, cell = rows(name), results()["tables"][name].get("cell", ["{}"])
    sources = list(dict.fromkeys(_source(row) for row in found))
    columns = [each for each in found[0] if each != "source"]
    lines = [[_text(row[each], cell) for each in columns] for row in found]
    if name == "planned":
        _beside(columns, lines, "measured, MiB", "off", [_off(row["predicted, MiB"], row["measured, MiB"], 2)
                                                         for row in found])  # fmt: skip
    if name in ("models", "formats", "planned"):
        _beside(columns, lines, "tok/s", FIT, [_fit(row) for row in found])
    if len(sources) > 1:
        columns.append("run")
        for line, row in zip(lines, found, strict=True):
            line.append(_letter(sources.index(_source(row))))
    ruled = ["---"] * len(columns)
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ruled, *lines))
    if len(sources) == 1:
        return f"{body}\n\n{sources[0]}"
    return f"{body}\n\n" + "\n".join(f"- {_letter(at)}: {each}" for at, each in enumerate(sources))


def launches() -> str:
    """The kernel times that `localq fit` predicts from; of those that a command repeats."""
    found = data("measurements.toml")
    parts: dict[str, list[tuple[str, str]]] = {
        kernel: [(f"{out} x {columns}: {us}", source) for out, columns, us, source in timed]
        for kernel, timed in found["products"].items()
    }
    parts["attention"] = [
        (f"{bits} bit, {heads} heads, {slots} slots: {us}", source)
        for bits, heads, slots, us, source in found["attention"]["rows"]
        if "command" in found["sources"][source]
    ]
    for name, part in found["step"].items():
        parts[name.removesuffix("_us").replace("_", " ")] = [(str(part["value"]), part["source"])]
    used = list(dict.fromkeys(source for cells in parts.values() for _, source in cells))
    lines = ["| kernel | out x in: µs, run |", "| --- | --- |"]
    for kernel, cells in parts.items():
        lines.append(f"| {kernel} | {'; '.join(f'{text} {_letter(used.index(source))}' for text, source in cells)} |")
    notes = [_of_launches(found["device"]["name"], at, found["sources"][name]) for at, name in enumerate(used)]
    return "\n".join([*lines, "", *notes])


def _of_launches(card: str, at: int, source: Row) -> str:
    conditions = f"; {source['conditions']}" if "conditions" in source else ""
    return f"- {_letter(at)}: {card}, {source['date']}: `{source['command']}`{conditions}."


def at_a_glance() -> str:
    """The table of README.md: figures of other tables, each beside that of others in the same run."""
    lines = ["| benchmark | localq | reference | card, date |", "| --- | --- | --- | --- |"]
    for entry in results()["glance"]:
        row, cells = _named(entry["table"], entry["row"])
        values = {"row": cells, "predicted": [predicted(recorded(row))] if FIT in entry["beside"] else []}
        if "other" in entry:
            values["other"] = _named(entry["table"], entry["other"])[1]
        cells = [entry["what"], entry["ours"].format(**values), entry["beside"].format(**values)]
        lines.append(f"| {' | '.join(cells)} | {row['source']['card']}, {row['source']['date']} |")
    return "\n".join(lines)


def _named(table: str, first: list[Any]) -> tuple[Row, list[Any]]:
    """The row that begins with these cells, by its columns and as it is."""
    raw = results()["tables"][table]["rows"]
    (at,) = [at for at, cells in enumerate(raw) if cells[: len(first)] == first]
    return rows(table)[at], raw[at]


def _source(row: Row) -> str:
    source = row["source"]
    conditions = f"; {source['conditions']}" if "conditions" in source else ""
    return f"{source['card']}, {source['date']}: `{source['command']}`{conditions}."


def _letter(at: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[at]


def _beside(columns: list[str], lines: list[list[str]], behind: str, column: str, values: list[str]) -> None:
    """Insert a column that is computed."""
    at = columns.index(behind) + 1
    columns.insert(at, column)
    for line, value in zip(lines, values, strict=True):
        line.insert(at, value)


def _fit(row: Row) -> str:
    if not row["tok/s"]:
        return "-"
    told = predicted(recorded(row))
    return f"{told:.{0 if told >= 100 else 1}f} ({_off(told, float(row['tok/s']), 0)})"


def _off(predicted: float, measured: float, digits: int) -> str:
    return f"{100 * (predicted / measured - 1):+.{digits}f} %"


def _text(value: Any, cell: list[str]) -> str:
    if isinstance(value, list):
        return " ".join(form.format(_text(part, cell)) for form, part in zip(cell, value, strict=True) if part != "")
    if isinstance(value, str):
        return value or "-"
    return f"{value:,}" if value >= 10_000 else f"{value}"
