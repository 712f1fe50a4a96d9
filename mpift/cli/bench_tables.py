"""What ``mpift bench`` shows: each report as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from mpift.bench.allreduce import AllreduceReport
    from mpift.bench.checkpoint import CheckpointReport
    from mpift.bench.step import StepReport
    from mpift.bench.straggler import StragglerReport
    from mpift.bench.verify import VerifyReport


def step_table(report: StepReport) -> Table:
    """The report for people: milliseconds, with the quartiles beside the median."""
    from rich.table import Table

    from mpift.bench.step import CONTENDERS

    model = report.model
    result = Table(
        title=f"one step of {model.name}: {model.parameters:,} parameters,"
        f" {report.ranks} ranks of {report.threads} thread(s)",
        caption=f"medians of {report.rounds} rounds in alternation, {report.steps} steps each;"
        f" mpift / DDP: {report.ratio_to_ddp:.2f},"
        f" round by round {report.round_ratios.lower:.2f} to {report.round_ratios.upper:.2f};"
        f" others used {100 * report.others_share:.0f} % of this machine meanwhile",
    )
    result.add_column("contender")
    for heading in ("median ms", "quartiles ms"):
        result.add_column(heading, justify="right")
    for name, words in CONTENDERS.items():
        spread = report.seconds[name]
        quartiles = f"{1e3 * spread.lower:.1f} to {1e3 * spread.upper:.1f}"
        result.add_row(words, f"{1e3 * spread.median:.1f}", quartiles)
    return result


def allreduce_tables(report: AllreduceReport) -> Group:
    """The report for people: what everybody took, and how far the targets were met."""
    from rich.console import Group
    from rich.table import Table

    from mpift.bench.allreduce import CONTENDERS, PEERS

    plan = report.plan
    ways = {"node": "in the node's shared memory", "mpi": "through MPI"}
    times = Table(
        title=f"one sum of float32 arrays over {plan.ranks} ranks of {report.threads} thread(s)",
        caption=f"medians of {plan.rounds} rounds in alternation, of the slowest rank\n"
        f"mpift has summed {ways[report.reduction]}; others used"
        f" {100 * report.others_share:.0f} % of this machine",
    )
    times.add_column("MiB", justify="right")
    times.add_column("contender")
    for heading in ("median ms", "quartiles ms"):
        times.add_column(heading, justify="right")
    targets = Table(title="targets")
    for heading in ("MiB", "ratio", "measured", "round by round", "wanted", ""):
        targets.add_column(heading, justify="left" if heading == "ratio" else "right")
    for row in report.rows:
        mib = f"{row.bytes >> 20}"
        for name, words in CONTENDERS.items():
            spread = row.seconds[name]
            quartiles = f"{1e3 * spread.lower:.2f} to {1e3 * spread.upper:.2f}"
            times.add_row(mib, words, f"{1e3 * spread.median:.2f}", quartiles)
        times.add_section()
        wanted = {target.name: target for target in row.targets(plan.ranks)}
        for peer in PEERS:
            ratios, target = row.round_ratios[peer], wanted.get(f"ratio_to_{peer}")
            targets.add_row(
                mib,
                f"mpift / {peer}",
                f"{row.ratio_to(peer):.2f}",
                f"{ratios.lower:.2f} to {ratios.upper:.2f}",
                "" if target is None else target.wanted,
                "" if target is None else target.verdict,
            )
    return Group(times, targets)


def straggler_table(report: StragglerReport) -> Table:
    """The report for people: steps per second, waiting for all and by majority, and the
    ratios with their bounds in brackets."""
    from rich.table import Table

    plan = report.plan
    result = Table(
        title=f"one of {plan.ranks} ranks late in each round: steps of"
        f" {1e3 * plan.step_seconds:.0f} ms and gradients of {report.bytes / 2**20:.0f} MiB",
        caption=_straggler_caption(report),
    )
    for heading in ("late by", "all /s", "majority /s", "speed-up", "of even", "took part"):
        result.add_column(heading, justify="right")
    for row in report.rows:
        result.add_row(
            f"{row.delay_steps:g} steps",
            f"{row.synchronous:.2f}",
            f"{row.majority:.2f}",
            f"{row.speedup:.2f} ({row.bound_speedup:.2f})",
            f"{row.fraction_of_even:.2f} ({row.bound_fraction:.2f})",
            f"{100 * row.participation:.0f} %",
        )
    return result


def _straggler_caption(report: StragglerReport) -> str:
    """What the rows do not say, a sentence a line."""
    ratios, plan = report.even_ratios, report.plan
    if report.named is None:
        named = "nobody was late"
    else:
        named = f"late most often: rank {report.named}, {report.late_rounds[report.named]} rounds"
    bounds = (
        "in brackets the bound, which knows nothing of communication, here"
        f" {100 * report.communication_share:.0f} % of a step"
    )
    even = (
        f"nobody late: {report.even.median:.2f} /s by majority, over all {ratios.median:.2f}"
        f" ({ratios.lower:.2f} to {ratios.upper:.2f} in {ratios.runs} turns)"
    )
    persistent = (
        f"rank {report.slow_member} always {plan.slowdown:g} times as slow: the others keep"
        f" {100 * report.others_fraction:.0f} % of their pace; {named}"
    )
    identical = f"parameters and optimizer state identical on all ranks: {report.identical}"
    return f"{bounds}\n{even}\n{persistent}\n{identical}"


def verify_table(report: VerifyReport) -> Table:
    """The report for people: means of the rank for which verification is dearest."""
    from rich.table import Table

    plan = report.plan
    on_to_off = [f"{row.model} {row.on_to_off.median:.3f}" for row in report.rows]
    result = Table(
        title=f"verification every {plan.every} steps on {plan.ranks} ranks of"
        f" {report.threads} thread(s): {report.ratio:.4f} times the step without",
        caption="models of the examples of these names; ratio: 1 + (wait + processor) / step;"
        f" timed in turn, with / without: {', '.join(on_to_off)}",
    )
    result.add_column("model")
    for heading in ("state MiB", "step ms", "waits us", "processor us", "of it messages", "ratio"):
        result.add_column(heading, justify="right")
    for row in report.rows:
        cost = row.cost
        result.add_row(
            row.model,
            f"{row.state_bytes / 2**20:.1f}",
            f"{1e3 * cost.step:.1f}",
            f"{1e6 * cost.waited:.1f}",
            f"{1e6 * cost.cpu:.1f}",
            f"{1e6 * cost.message:.1f}",
            f"{cost.ratio:.4f}",
        )
    return result


def checkpoint_tables(report: CheckpointReport) -> Group:
    """The report for people: what everybody took, and how far the targets were met."""
    from rich.console import Group
    from rich.table import Table

    from mpift.bench.checkpoint import READS, WRITES

    plan, mib = report.plan, 1 << 20
    times = Table(
        title=f"{report.state_bytes / mib:.0f} MiB of state in {report.tensors} tensors on each of"
        f" {plan.ranks} ranks of {report.threads} thread(s)",
        caption=f"medians of {plan.rounds} rounds in alternation, of the slowest rank;"
        f" load average at the start: {report.load_average:.1f}",
    )
    times.add_column("what was done")
    for heading in ("median ms", "quartiles ms", "page cache"):
        times.add_column(heading, justify="right")
    for name, words in {**WRITES, **READS}.items():
        spread = report.seconds[name]
        quartiles = f"{1e3 * spread.lower:.0f} to {1e3 * spread.upper:.0f}"
        cache = report.page_cache.get(name, "")
        times.add_row(words, f"{1e3 * spread.median:.0f}", quartiles, cache)
    sizes = ", ".join(
        f"{name.removesuffix('_bytes')} {size / mib:.1f}" for name, size in report.sizes.items()
    )
    peak, limit = report.peak_bytes / mib, report.memory_limit_bytes / mib
    targets = Table(
        title="targets",
        caption="training is held by the first save of a manager, which makes the arena:"
        f" {1e3 * report.first_stall_seconds:.0f} ms\nMiB written: {sizes}"
        f"\nMiB of memory: at most {peak:.0f}; state and arenas are {limit:.0f}",
    )
    targets.add_column("ratio")
    for heading in ("measured", "wanted", ""):
        targets.add_column(heading, justify="right")
    for target in report.targets():
        targets.add_row(target.words, f"{target.measured:.2f}", target.wanted, target.verdict)
    return Group(times, targets)
