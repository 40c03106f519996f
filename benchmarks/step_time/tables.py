"""Tables of times of steps, by codec and form of the exchange, beside losses."""

from __future__ import annotations

from functools import partial

from benchmarks.harness.launch import Layout
from benchmarks.harness.tables import (
    NA,
    Column,
    Result,
    Row,
    Table,
    caption,
    links_of,
    markdown,
    megabytes,
    name_of,
    of_link,
    pivot,
    reasons,
)


def step_times(result: Result, *, hosts: int | None = None) -> str | None:
    """Time of a step and bytes per codec: a column pair for every link, slowest link first."""
    rows = [row for row in result["rows"] if hosts in (None, row["hosts"])]
    measured = [row for row in rows if row.get("reason") is None]
    if not measured:
        return None
    links, hosts = links_of(measured), measured[0]["hosts"]
    columns: list[Column] = [(f"{hosts} nodes", "{codec!n}"), ("MB sent", "{wire_bytes!b}")]
    columns += [of for link in links for of in _of_link(link)]
    by_link = sorted(measured, key=lambda row: links.index(row["link_mbit"]))
    order = list(dict.fromkeys(row["codec"] for row in measured))
    lines = sorted(
        pivot(by_link, of=["codec"], by="link_mbit"), key=lambda row: order.index(row["codec"])
    )
    rounds = {row["link_mbit"]: row["rounds"] for row in measured}
    timed = ", ".join(f"{rounds[link]} at {of_link(link)}" for link in links)
    text = (
        f"Median step of 10 x Linear(1024, 1024), 42 MB of gradients, {hosts} nodes x "
        f"{rows[0]['ranks_per_host']} ranks; MB sent per rank and step, over the slowest of these "
        f"links. Codecs with their default options. Timed steps: {timed}."
    )
    return "\n\n".join([markdown(columns, lines), *reasons(rows), caption(text, result["meta"])])


def overview(steps: Result, losses: Result) -> str | None:
    """Times of a step on two hosts, and final losses of the GPT, of a few codecs."""
    chosen = ("ddp", "torch-fp16-hook", "int8", "int4", "terngrad", "powersgd")
    rows = [row for row in steps["rows"] if row["hosts"] == 2 and row["codec"] in chosen]
    off = {
        row["row"]: row["metrics"]["val_loss"]
        for row in losses["rows"]
        if (row["task"], row["ranks"]) == ("gpt", 2) and row["metrics"]
    }

    def loss(row: Row) -> str:
        if row["codec"] == "ddp":
            return "reference"
        found = off.get(row["codec"])
        return "{diff_pct_of_ddp:+.1f} ± {diff_pct_std:.1f} %".format(**found) if found else NA

    columns: list[Column] = [
        ("", "{codec!n}"),
        ("MB sent", "{wire_bytes!b}"),
        ("final loss vs fp32", loss),
    ]
    for link in links_of(rows):
        columns.append((of_link(link), "{step_ms_median:,.0f} ms", link))
        columns.append(("speedup", "{speedup_vs_fp32:.1f}x", link))
    lines = {row["codec"]: row for row in pivot(rows, of=["codec"], by="link_mbit")}
    seeds = max(len(row["seeds"]) for row in losses["rows"])
    text = (
        "Median step and speedup over fp32 DDP: 10.5 M parameters, 2 nodes on one machine, joined "
        f"by an emulated link. Loss: byte-level GPT, 2 ranks, AdamW, {seeds} seeds, mean and "
        "standard deviation of the difference after a short training."
    )
    table = markdown(columns, [lines[codec] for codec in chosen])
    return f"{table}\n\n{caption(text, steps['meta'])}"


def choice(steps: Result, losses: Result) -> str | None:
    """The fastest codecs that end where fp32 DDP ends, by ranks, link and optimizer."""
    tasks = {"gpt": "AdamW", "digits": "SGD"}
    matching: dict[tuple[str, int], set[str]] = {}
    for row in losses["rows"]:
        if row["metrics"] and all(each["within_ddp_spread"] for each in row["metrics"].values()):
            matching.setdefault((row["task"], row["ranks"]), set()).add(row["row"])

    def fastest(row: Row, *, task: str) -> str:
        of_codec = row["by"]
        same = (each for each in matching[task, row["hosts"]] if each.isalnum())  # as it is
        chosen = [of_codec[each] for each in same if each in of_codec]
        best = min(each["step_ms_median"] for each in chosen)
        near = [each for each in chosen if each["step_ms_median"] <= 1.05 * best]
        near.sort(key=lambda each: (each["step_ms_median"], each["codec"]))
        names = ", ".join(f"`{each['codec']}`" for each in near)
        return f"{names}: {near[0]['speedup_vs_fp32']:.1f}x"

    def share(row: Row) -> str:
        alone, ddp = (row["by"][each]["step_ms_median"] for each in ("no-comm", "ddp"))
        return f"{100 * (1 - alone / ddp):.1f} %"

    rows = [row for row in steps["rows"] if row["reason"] is None]
    columns: list[Column] = [
        ("ranks", "{hosts}"),
        ("link", "{link_mbit!l}"),
        ("communication in fp32 DDP's step", share),
        *((optimizer, partial(fastest, task=task)) for task, optimizer in tasks.items()),
    ]
    lines = sorted(
        pivot(rows, of=["hosts", "link_mbit"], by="codec"),
        key=lambda row: (row["hosts"], row["link_mbit"]),
    )
    text = (
        "Codecs whose final loss (and accuracy) is within the spread of fp32 DDP's seeds on as "
        "many ranks; of these the fastest, all within 5 % of it, and its speedup. Step: 42 MB of "
        "gradients, one rank per node. Losses: byte-level GPT with AdamW, digits classifier with "
        "SGD."
    )
    return f"{markdown(columns, lines)}\n\n{caption(text, steps['meta'])}"


def forms(result: Result) -> str | None:
    """Step times by form and codec, a table for every layout."""
    rows = [row for row in result["rows"] if row["reason"] is None]
    tables = []
    for layout in dict.fromkeys(row["layout"] for row in rows):
        shape = Layout.parse(layout)
        of_layout = [row for row in rows if row["layout"] == layout]
        mean_ranks = shape.world_size / shape.hosts
        ranks = " and ".join(map(str, [shape.counts[0]] if shape.even else shape.counts))
        columns: list[Column] = [
            (f"{shape.hosts} nodes x {ranks} ranks", _form_and_codec),
            ("MB to others", lambda row, n=mean_ranks: megabytes(row["wire_bytes"] * n)),
            ("MB inside", "{lo_bytes!b}"),
        ]
        for link in links_of(of_layout):
            columns += [*_of_link(link), ("% of the link", "{wire_limit_pct:,.0f}", link)]
        tables.append(markdown(columns, pivot(of_layout, of=["form", "codec"], by="link_mbit")))
    text = (
        "Median step of 10 x Linear(1024, 1024), 42 MB of gradients; MB that a node sends to "
        "others (interface) and to itself (loopback) in a step; % of the link: bytes over the "
        "link's rate, by the time that communication adds to the step. All ranks share two cores."
    )
    return "\n\n".join([*tables, caption(text, result["meta"])]) if tables else None


_MODELS = {
    "linear": "10 x Linear(1024, 1024), 42 MB of gradients",
    "gpt": "the demo's byte-level GPT, 1.4 M parameters, 5.6 MB of gradients, batch inputs of "
    "64 bytes per rank",
}


def sharded(result: Result) -> str | None:
    """Step times of sharded models, against torch's HSDP with as many micro-batches."""
    rows = [row for row in result["rows"] if row["reason"] is None and row["form"] == "fsdp"]
    if not rows:
        return None
    native = {
        (row["micro_batches"], row["link_mbit"]): row["step_ms_median"]
        for row in rows
        if row["codec"].startswith("native-hsdp") and "deferred" not in row["codec"]
    }

    def faster(row: Row) -> str:
        of = native.get((row["micro_batches"], row["link_mbit"]))
        return NA if of is None else f"{of / row['step_ms_median']:.2f}x"

    columns: list[Column] = [
        ("row", lambda row: f"`{row['codec'].partition('@')[0]}`"),
        ("micro-batches", "{micro_batches}"),
        ("MB sent", "{wire_bytes!b}"),
    ]
    for link in links_of(rows):
        columns += [(f"{of_link(link)}: step", "{step_ms_median:,.0f} ms", link)]
        columns += [("faster than HSDP", faster, link)]
    model = _MODELS[result["meta"]["arguments"].get("model", "linear")]
    text = (
        f"Median step of {model}, {rows[0]['layout']} nodes x ranks: sharded within nodes but for "
        "`all-ranks`; MB that a rank sends to other nodes in a step (interface). Kernels are "
        "compiled. All ranks share two cores."
    )
    table = markdown(columns, pivot(rows, of=["codec"], by="link_mbit"))
    return f"{table}\n\n{caption(text, result['meta'])}"


_LOCAL_STEP = ("{step_ms:,.0f} ms", "{share:x100.0f} %", "{ratio:.2f}")

LOCAL_STEPS = Table(
    columns=lambda rows: [
        ("", "{row!n}"),
        ("kB sent per step", lambda row: f"{row['wire_bytes'] / 1e3:,.0f}"),
        *((f"{of_link(n)}: step / throughput / ratio", _LOCAL_STEP, n) for n in links_of(rows)),
    ],
    lines=partial(pivot, of=["row"], by="link_mbit"),
    text=lambda meta, rows: (
        "Byte-level GPT of 1.4 M parameters on 2 nodes, steps in whole windows of local ones: time "
        "of a step; throughput in percent of that without communication; ratio of the measured "
        "step to the one that `lightning-dist profile whatif` predicts from a profile of fp32 DDP "
        f"at {of_link(meta['arguments']['base'])}. Codecs between local steps are not compiled. "
        "All ranks share two cores."
    ),
)


def _of_link(link: float | None) -> list[Column]:
    return [
        (f"{of_link(link)}: step", "{step_ms_median:,.0f} ms", link),
        ("speedup vs fp32", partial(_speedup, over="fp32"), link),
        ("vs fp16 hook", partial(_speedup, over="fp16"), link),
    ]


def _speedup(row: Row, *, over: str) -> str:
    return NA if row["codec"] == "no-comm" else f"{row[f'speedup_vs_{over}']:.2f}x"


def _form_and_codec(row: Row) -> str:
    return name_of(row["codec"]) if row["form"] is None else f"{row['form']} `{row['codec']}`"
