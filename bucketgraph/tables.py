"""What the command line shows: tables of buckets, hits and warm-up, and progress that suits its output.

A terminal gets a bar; a log gets plain lines, one per finished stage of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from bucketgraph.config import BucketSet, PhaseSpec
from bucketgraph.stats import Stats
from bucketgraph.warmup import Progress, WarmupReport


def _table(title: str, columns: Sequence[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    right = set(numbers)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def stats_table(phases: Iterable[Stats]) -> Table:
    """Buckets, hits and padding of each phase; buckets that were never hit are left out."""
    columns = ("phase", "bucket", "executable", "hits", "real", "padded", "padding")
    table = _table("Buckets that ran", columns, columns[3:])
    for stats in phases:
        for row in stats.buckets:
            if row.hits:
                cells = (str(row.hits), str(row.real), str(row.padded), f"{100 * (row.padding - 1):.0f} %")
                table.add_row(stats.name, row.bucket, row.executable, *cells)
        for way, count in stats.fallbacks.items():
            table.add_row(stats.name, "-", way, str(count), "", "", "")
    return table


def warmup_table(report: WarmupReport) -> Table:
    columns = ("phase", "bucket", "executable", "seconds", "MiB", "check", "variant", "error")
    table = _table(f"Warm-up on {report.device}: {report.seconds:.1f} s, {report.mib:.0f} MiB", columns, columns[3:6])
    for row in report.buckets:
        check = "-" if row.check is None else f"{row.check:.1e}"
        table.add_row(
            row.name,
            row.bucket,
            row.executable,
            f"{row.seconds:.2f}",
            f"{row.mib:.1f}",
            check,
            row.variant or "",
            escape(row.error or ""),
        )
    return table


def set_tables(bucket_set: BucketSet) -> Iterator[Table]:
    """What a bucket set holds: axes, policies and slots of each phase."""
    phases: dict[str, PhaseSpec] = {**bucket_set.phases} if bucket_set.phases else {bucket_set.name: bucket_set}
    axes = _table(f"{bucket_set.name} ({bucket_set.source})", ("phase", "axis", "sizes", "count"), ("count",))
    rules = _table(
        "Policies", ("phase", "executable", "overflow", "max_padding", "outputs_are", "buckets"), ("buckets",)
    )
    slots = _table("Slots", ("phase", "slot", "kind", "shape", "dtype", "pad"), ())
    for name, phase in phases.items():
        for axis, sizes in phase.axes.items():
            axes.add_row(name, axis, " ".join(map(str, sizes)), str(len(sizes)))
        limit = "none" if phase.max_padding is None else f"{phase.max_padding:g}"
        count = str(len(phase.lattice().buckets))
        rules.add_row(name, phase.executable, phase.overflow, limit, str(phase.outputs_are), count)
        for slot, spec in phase.inputs.items():
            slots.add_row(name, slot, "input", _shape(spec.shape), spec.dtype, str(spec.pad))
        for slot, out in phase.outputs.items():
            slots.add_row(name, slot, "output", _shape(out.shape), "", "")
    yield from (axes, rules, *((slots,) if slots.row_count else ()))


def _shape(dims: Sequence[str | int]) -> str:
    return escape("[" + ", ".join(map(str, dims)) + "]")


@contextmanager
def progress(console: Console) -> Iterator[Callable[[Progress], None]]:
    """An `on_progress` for warm-up: a bar on a terminal, plain lines elsewhere."""
    if not console.is_terminal:

        def line(step: Progress) -> None:
            ending = f"FAILED: {step.error}" if step.error else f"{step.seconds:.2f} s"
            print(f"{step.done}/{step.total} {step.stage:7} {step.name} {step.bucket}  {ending}", file=console.file)
            console.file.flush()

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("warming up", total=None)

        def advance(step: Progress) -> None:
            bar.update(
                task, completed=step.done, total=step.total, description=f"{step.stage} {step.name} {step.bucket}"
            )
            if step.error and step.stage == "price":
                console.print(f"[red]{step.name} {step.bucket}: {escape(step.error)}", highlight=False)

        yield advance
