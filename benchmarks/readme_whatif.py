"""The tables about predictions: how far they are from what was measured, and how they scale."""

from __future__ import annotations

from benchmarks.readme_markdown import Result, caption, number, table


def errors(result: Result) -> str | None:
    """Each setting at each rate: what was measured, and the error of the prediction."""
    pairs = [row for row in result["rows"] if row["kind"] == "pair"]
    if not pairs:
        return None
    links = sorted({row["link_mbit"] for row in pairs})
    found = {(row["setting"], row["link_mbit"]): row for row in pairs}
    heads = ["gradients", *(f"{link:g} Mbit/s" for link in links)]
    lines = [
        [f"`{setting}`", *(_cell(found.get((setting, link))) for link in links)]
        for setting in dict.fromkeys(row["setting"] for row in pairs)
    ]
    meta = result["meta"]
    base, of, any_of = meta["base"], meta["errors"], meta["errors_from_any"]
    text = (
        "A step as measured, medians, and by how much its prediction is off. All from one profile, "
        f"of `{base['setting']}` at {base['link_mbit']:g} Mbit/s, with costs of codecs and small "
        "collectives that were measured before the first step. 2 hosts of one rank with one core, "
        f"42 MB of gradients. Error over {of['rows']:g} predictions: median "
        f"{100 * of['median']:.1f} %, largest {100 * of['largest']:.1f} %. From each of the "
        f"{len(pairs)} runs as the profile, {any_of['rows']:g} predictions: median "
        f"{100 * any_of['median']:.1f} %, largest {100 * any_of['largest']:.1f} %."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


def _cell(row: dict[str, object] | None) -> str:
    if row is None:
        return "n/a"
    measured = f"{number(row['measured_ms'], 0)} ms"
    if row["is_base"]:
        return f"{measured} (the profile)"
    error = row["relative_error"]
    return f"{measured}, n/a" if error is None else f"{measured}, {100 * error:+.0f} %"


def scaling(result: Result) -> str | None:
    """What the same profile says of many hosts."""
    rows = [row for row in result["rows"] if row["kind"] == "scaling"]
    if not rows:
        return None
    hosts = sorted({row["hosts"] for row in rows})
    found = {(row["form"], row["codec"], row["hosts"]): row["step_ms"] for row in rows}
    heads = ["PREDICTION", *(f"{count:,} hosts" for count in hosts)]
    lines = [
        [f"`{codec}`", *(_ms(found[form, codec, count]) for count in hosts)]
        for form, codec in dict.fromkeys((row["form"], row["codec"]) for row in rows)
    ]
    text = (
        "Predicted, not measured: milliseconds of a step by the number of hosts, one rank each, "
        f"flat, at {result['meta']['base']['link_mbit']:g} Mbit/s, from the same profile of 2 "
        "hosts. `topk` gathers what every rank has sent: its bytes grow with the number of ranks."
    )
    return "\n\n".join([table(heads, lines), caption(text, result)])


def _ms(value: float | None) -> str:
    return "n/a" if value is None else number(value, 0)
