"""What the parts of a step and the other figures mean, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """A part of a step: its name beside a picture, and what is in it."""

    name: str
    meaning: str


PART_WORDS: Mapping[str, Words] = {
    "data": Words(
        "data, callbacks",
        "until the next forward pass begins: waiting for its batch, and what the loop does after a "
        "step, such as callbacks, loggers and checkpoints",
    ),
    "forward": Words("forward pass", "from its begin to that of the backward pass: the loss"),
    "backward": Words(
        "backward pass",
        "computing gradients; communication that this hides costs no time and is in here",
    ),
    "wait": Words(
        "exposed: waiting",
        "gradients are complete here, and another rank has not come to the exchange yet",
    ),
    "transfer": Words(
        "exposed: transfer", "every rank is there, and an exchange is under way: the network"
    ),
    "codec": Words("exposed: codec", "encoding and decoding while no exchange is under way"),
    "unattributed": Words(
        "exposed: unattributed",
        "until the mean of all gradients is there, and none of the three above",
    ),
    "optimizer": Words(
        "optimizer",
        "from the mean of all gradients to the end of the step: clipping, callbacks before the "
        "step, updating the parameters",
    ),
    "other": Words("other", "time of the step that is in none of the parts above; usually none"),
}

DEFINITIONS: Mapping[str, str] = {
    "step": (
        "From the end of one optimizer step to the end of the next. Validation belongs to no step. "
        "Milliseconds are means over steps and ranks unless a label says otherwise. All parts, and "
        "every percentage of them, are of the steps that were looked at in detail; only what is "
        "said of all steps is of all. Bytes are per step and rank; 1 MB is a million bytes, "
        "1 Gbit/s a billion bits per second."
    ),
    "exposed": (
        "Time between the last gradient of the backward pass and the mean of all gradients: what "
        "compute does not hide. It is waiting, transfer, codec and unattributed, and its share "
        "of the step is the one figure to look at."
    ),
    "hidden, overlap": (
        "Hidden is the time in which an exchange was under way before the last gradient was "
        "there. Overlap is hidden over all time in which any exchange was under way."
    ),
    "wait and transfer": (
        "An exchange cannot move before its last member has come to it. Until that arrival a rank "
        "waits, from there on bytes travel. Arrivals are compared on rank 0's clock; the table of "
        "ranks says how exactly."
    ),
    "others waited for it": (
        "Waiting of all other ranks, hidden or not, for the rank that came last. The straggler is "
        "the rank that is clearly the last, if there is one: two thirds of the waiting are for "
        "it, in more steps than chance would give, and by more than clocks are uncertain."
    ),
    "raw, wire, ratio": (
        "Raw is what uncompressed DDP would have sent from a rank, wire is what was sent, and the "
        "ratio is raw over wire."
    ),
    "wire and effective bandwidth": (
        "Bits sent over the time in which exchanges were under way, without waiting, each until "
        "its last member was done. The wire bandwidth is of a host, with all its ranks, to other "
        "hosts (on a single host, of a rank), and comparable with the link; the effective one is "
        "what uncompressed DDP would have needed for the same time. The peak is the best that was "
        "measured on the idle link, not what the hardware promises."
    ),
    "compression error": (
        "Of p, what a rank has encoded (its gradient, and the residual: what it still owed), and "
        "C(p), what its payload says of that: the relative error is |p - C(p)| / |p|, the cosine "
        "that of the angle between them, the residual ratio the norm of what is owed after the "
        "step over that of the gradient. A ratio that keeps growing is a codec that loses too "
        "much. One bucket in turn, of a random sample of its elements; what travels uncompressed "
        "is left out, and where hosts reduce among themselves first, it is of the way between them."
    ),
    "profiler overhead": "Time that the profiler itself took, as it has clocked it.",
    "n/a": "Not measured; the reasons are listed above.",
}
