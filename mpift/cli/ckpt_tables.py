"""What ``mpift ckpt`` prints for people; the figures come from ``mpift.checkpoint.overview``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from mpift.checkpoint.overview import Details, Difference, Summary, percent
from mpift.checkpoint.retention import Swept

_NAMES_SHOWN = 20
_GENERATION = (
    "gen: generation. One begins when a job opens the directory or goes back to an older step;"
    " checkpoints of a higher one are newer, whatever their step."
)


def size(size_bytes: int) -> str:
    """Bytes for people, in powers of ten."""
    return decimal(size_bytes)


def _time(unix_time: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time))


def _table(left: str, right: str) -> Table:
    """Columns by their headings with commas between, those with numbers at the right."""
    table = Table()
    for heading in filter(None, left.split(", ")):
        table.add_column(heading, overflow="fold")
    for heading in filter(None, right.split(", ")):
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _damaged(text: str) -> Text:
    return Text(f"damaged: {text}", style="red")


def listing_table(rows: Sequence[Summary]) -> Table:
    """A line a checkpoint. Generations are shown where there are several, pins where there are any:
    in a narrow terminal each column costs the others their width."""
    several = len({row.generation for row in rows}) > 1
    table = _table("", f"step{', gen' if several else ''}, time, state, new, changed, base, ranks")
    pinned = any(row.pins for row in rows)
    if pinned:
        table.add_column("pins", overflow="fold")
    if several:
        table.caption = _GENERATION
    for row in rows:
        table.add_row(
            str(row.step),
            *([str(row.generation)] if several else []),
            _time(row.unix_time),
            size(row.state_bytes),
            size(row.new_bytes),
            percent(row.changed_share),
            "-" if row.base is None else str(row.base),
            str(row.ranks),
            *([Text(", ".join(row.pins))] if pinned else []),
        )
    return table


def damage_list(reasons: Iterable[str]) -> list[RenderableType]:
    """A line each."""
    return [_damaged(reason) for reason in reasons]


def details_tables(facts: Details, top: int) -> list[RenderableType]:
    """Summary, tensors and files of a checkpoint."""
    about = facts.summary
    tensors = _table("tensor, dtype, shape", "size, stored, blocks, new")
    for tensor in facts.tensors[:top]:
        tensors.add_row(
            Text(tensor.name),
            tensor.dtype,
            " x ".join(map(str, tensor.shape)) or "scalar",
            size(tensor.size_bytes),
            size(tensor.stored_bytes),
            str(tensor.blocks),
            str(tensor.new_blocks),
        )
    more = len(facts.tensors) - top
    if more > 0:
        left = sum(tensor.size_bytes for tensor in facts.tensors[top:])
        tensors.caption = f"and {more} smaller ones of {size(left)} together: --all"
    files = _table("block file", "size, used by this checkpoint")
    for file in facts.files:
        files.add_row(Text(file.name), size(file.size_bytes), percent(file.live_share))
    pins = f", pinned: {', '.join(about.pins)}" if about.pins else ""
    sizes = (
        f"state: {size(about.state_bytes)} in {len(facts.tensors)} tensors and {about.blocks}"
        f" blocks; stored: {size(facts.stored_bytes)}, a byte for {facts.encoding_ratio:.2f};"
        f" written for this checkpoint: {size(about.new_bytes)}"
    )
    return [
        f"step {about.step}, generation {about.generation}, {_time(about.unix_time)}{pins}",
        f"written by job {about.job} with {about.ranks} ranks and mpift {about.version}",
        sizes,
        facts.about_change,
        tensors,
        files,
    ]


def verdicts(results: Iterable[dict[str, Any]]) -> list[RenderableType]:
    """A line for a good checkpoint, and one for each damage of another one."""
    lines: list[RenderableType] = []
    for result in results:
        step = result["step"]
        name = result["folder"] if step is None else f"step {step}"
        if not result["damage"]:
            lines.append(Text(f"{name}: every digest is right", style="green"))
            if not result["index"]:
                lines.append(f"{name} has no index.h5 for plain HDF5: mpift ckpt index writes it")
        lines += [_damaged(f"{name}: {damage}") for damage in result["damage"]]
    return lines


def difference_tables(facts: Difference, older: int, newer: int) -> list[RenderableType]:
    """What changed between two checkpoints."""
    share = percent(facts.blocks_changed / max(1, facts.blocks))
    counts = (
        f"from step {older} to step {newer}: {len(facts.added)} tensors added,"
        f" {len(facts.removed)} removed, {len(facts.changed)} changed, {facts.unchanged} as before;"
        f" {facts.blocks_changed} of {facts.blocks} blocks ({share}) are new"
    )
    lines: list[RenderableType] = [counts]
    for sign, names in (("+", facts.added), ("-", facts.removed)):
        lines += [f"{sign} {name}" for name in names[:_NAMES_SHOWN]]
        if len(names) > _NAMES_SHOWN:
            lines.append(f"{sign} and {len(names) - _NAMES_SHOWN} more: --json names all")
    if facts.changed:
        table = _table("tensor, what changed", "blocks changed, of")
        for change in facts.changed:
            numbers = (str(change.blocks_changed), str(change.blocks))
            table.add_row(Text(change.name), Text(change.what), *numbers)
        lines.append(table)
    return lines


def sweep_lines(swept: Swept, dry_run: bool) -> list[RenderableType]:
    """What was removed, or would be."""
    verb = "would remove" if dry_run else "removed"
    steps = ", ".join(map(str, swept.steps)) or "none"
    lines: list[RenderableType] = [
        f"{verb} {swept.files} files of {size(swept.bytes)}; checkpoints of steps: {steps}"
    ]
    if swept.held:
        lines.append(Text(swept.held, style="yellow"))
    return lines
