"""The reports of ``torchstore bench``, as text."""

from __future__ import annotations

from torchstore_cli.reports import BenchReport, TransportsReport
from torchstore_cli.screen import Screen
from torchstore_core.reports.units import human_bytes, human_latency

__all__ = ["show_bench", "show_transports"]


def show_bench(screen: Screen, report: BenchReport) -> None:
    """Show rates and latencies, each beside its floor."""
    floors, small, large, ratios = report.floors, report.small, report.large, report.ratios

    def rate(seconds: float) -> str:
        return f"{large.nbytes / seconds / 1e9:.2f} GB/s"

    size, little = human_bytes(large.nbytes), human_bytes(small.nbytes)
    threads = f"{report.copy_threads} copy thread{'s' if report.copy_threads != 1 else ''}"
    screen.line((report.address or "a store of its own", "bold"), f" · {threads}")
    screen.line(("put here, got by another process, which checked every byte", "dim"))
    screen.line()
    copy, echo = f"{rate(floors.warm_copy_s)} warm copy", f"{human_latency(floors.echo_s)} echo"
    screen.table(
        ("WHAT", "RESULT", "FLOOR", "RATIO"),
        [
            (f"put {size}, first", rate(large.first_put_s), copy, f"{ratios['first_put']:.2f}"),
            (f"put {size}, again", rate(large.put_s), copy, f"{ratios['put']:.2f}"),
            (
                f"get {size} in place",
                rate(large.get_in_place_s),
                copy,
                f"{ratios['get_in_place']:.2f}",
            ),
            (f"get {size} zero-copy", human_latency(large.get_zero_copy_s), "", ""),
            (
                f"put {little}, p50",
                human_latency(small.put_p50_s),
                echo,
                f"{ratios['small_put_p50']:.1f} ×",
            ),
            (f"put {little}, p99", human_latency(small.put_p99_s), "", ""),
            (
                f"get {little}, p50",
                human_latency(small.get_p50_s),
                echo,
                f"{ratios['small_get_p50']:.1f} ×",
            ),
            (f"get {little}, p99", human_latency(small.get_p99_s), "", ""),
        ],
        right=(1, 2, 3),
    )
    screen.line()
    screen.line((f"floor of never touched memory: {rate(floors.cold_copy_s)}", "dim"))


def show_transports(screen: Screen, report: TransportsReport) -> None:
    """Show a line for each transport and volume."""
    screen.line((report.address or "a store of its own", "bold"))
    screen.line((f"{human_bytes(report.nbytes)}, from this process", "dim"))
    screen.line()
    screen.table(
        ("TRANSPORT", "VOLUME", "PUT", "GET IN PLACE", "LATENCY", ""),
        [
            (
                line.transport,
                line.volume,
                f"{line.put_bytes_per_s / 1e9:.2f} GB/s" if line.error is None else "–",
                f"{line.get_bytes_per_s / 1e9:.2f} GB/s" if line.error is None else "–",
                human_latency(line.latency_s) if line.error is None else "–",
                line.error or "",
            )
            for line in report.lines
        ],
        right=(2, 3, 4),
        prose=True,
    )
    if report.saved is not None:
        screen.line()
        screen.line(f"bids on these links are corrected by {report.saved} from now on")
