"""Tables of kernels and memory."""

from __future__ import annotations

from benchmarks.harness.tables import Result, Table, pivot


def kernels(result: Result) -> str | None:
    """Speed of encode and settle beside a copy; fused kernels, where a codec has them."""
    rows = [row for row in result["rows"] if "mode" in row]
    of_mode = pivot(rows, of=["codec", "error_feedback"], by="mode")
    lines = [row["by"].get("fused", row) for row in of_mode]
    return KERNELS({**result, "rows": lines})


KERNELS = Table(
    columns=[
        ("codec", "`{codec}`"),
        ("error feedback", "{error_feedback!y}"),
        ("kernels", "{mode}"),
        ("encode, GB/s", "{encode_gb_s:,.1f}"),
        ("% of copy", "{encode_limit_pct:,.0f}"),
        ("decode and commit, GB/s", "{settle_gb_s:,.1f}"),
        ("% of copy", "{settle_limit_pct:,.0f}"),
        ("both, % of copy", "{limit_pct:,.0f}"),
    ],
    text=lambda meta, rows: (
        "GB of fp32 gradient per second of one thread's CPU time; a copy makes "
        f"{rows[0]['copy_gb_s']:.1f} GB/s. % of copy: of the rate at which a copy moves the bytes "
        "that the pass has to touch."
    ),
)


MEMORY = Table(
    has="residual_bytes_per_element",
    columns=[
        ("ranks", "{world_size}"),
        ("residual, bytes per element", "{residual_bytes_per_element:,.1f}"),
        ("payload buffers, bytes per element", "{buffer_bytes_per_element:,.1f}"),
        ("resident set after warm-up", "{resident_mb_warm:.0f} MB"),
        ("at the end", "{resident_mb_end:.0f} MB"),
        ("steps", "{steps:,}"),
    ],
    text="Memory of one rank.",
)
