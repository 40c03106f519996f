"""An agent of torch's that replaces workers one by one, where they recover in their processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it silently
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from lightning_dist.base.log import get_logger
from lightning_dist.elastic.launcher.agent import LauncherAgent, outcomes_of
from lightning_dist.elastic.launcher.forks import WorkerProcess
from lightning_dist.elastic.private import close_output, store_of_rendezvous
from lightning_dist.elastic.process.lifecycle import EXIT_LEAVE, EXIT_RESTART, EXIT_UNSAVED
from lightning_dist.elastic.process.outcome import Outcome
from lightning_dist.elastic.recovery.coordinator import (
    CoordinatorSettings,
    RecoveryHost,
    RecoveryNode,
)

log = get_logger(__name__)

LOOK_SECONDS, STORE_SECONDS, CPU_SECONDS, NODES_SECONDS = 0.01, 0.05, 0.25, 1.0
"""Between looks at processes, at the store of recovery, at CPU times, and for nodes that wait."""
END_SECONDS = 5.0
"""Time for workers to end by themselves where there can be no generation, and for launchers."""
JOIN_TIMEOUT = timedelta(seconds=5)
"""Time for the store of a job to answer; it may have died with its launcher."""
ALL_STOP = (EXIT_RESTART, EXIT_UNSAVED, EXIT_LEAVE)
"""Exit codes that all workers have together."""


class RecoveringAgent(LauncherAgent):
    """An agent that replaces workers one by one while they are members of a generation.

    Every start of all workers has a store for recovery, hosted by the first node's agent. As long
    as no generation was made there, because the script knows nothing of recovery or has not come
    so far, everything is as in torch's agent.
    """

    _host: RecoveryHost | None = None
    _node: RecoveryNode | None = None
    _left = ""
    """The address of the store that was used last."""
    _is_recovering = False
    """A generation has been made in this start."""
    _counted = -1
    """The newest generation with workers whose failures were counted."""
    _has_lost_store = False
    _ended: dict[int, int]
    """Exit codes of processes that are not replaced, or not yet, by local rank."""
    _end_by: float

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._close_recovery()
        self._ended, self._end_by = {}, float("inf")
        self._counted, self._has_lost_store = -1, False
        if not self._join_recovery(worker_group):
            super()._rendezvous(worker_group)
            self._open_recovery(worker_group)

    def _open_recovery(self, worker_group: WorkerGroup) -> None:
        """One store for all nodes of this start."""
        spec = worker_group.spec
        store, size = worker_group.store, worker_group.group_world_size
        assert store is not None
        assert size is not None
        nodes = _nodes(spec, size)
        if not isinstance(spec.entrypoint, str) or nodes is None:
            return
        settings = CoordinatorSettings.from_env(nodes=nodes, ranks=spec.local_world_size)
        key = "lightning_dist/recovery"
        if worker_group.group_rank == 0:
            host = "localhost" if nodes[1] == 1 else worker_group.master_addr
            assert host is not None
            places = worker_group.workers[0].world_size
            self._host = RecoveryHost(host, settings, nodes=size, places=places)
            store.set(key, self._host.address)
        self._node = RecoveryNode(
            store.get(key).decode(), ranks=spec.local_world_size, min_workers=settings.min_workers
        )
        self._node.join(worker_group.group_rank)

    def _join_recovery(self, worker_group: WorkerGroup) -> bool:
        """Start workers beside those that are in a generation already, if there are any.

        torch's rendezvous lets a node wait, at which all others restart their workers, so this
        node does not go there: the store of the rendezvous has the address of the job.
        """
        spec, rendezvous_store = worker_group.spec, _rendezvous_store(worker_group.spec)
        address = (
            rendezvous_store.get(_key(spec)).decode()
            if rendezvous_store and rendezvous_store.check([_key(spec)])
            else ""
        )
        if rendezvous_store is None or address in ("", self._left):
            return False
        nodes = _nodes(spec, 1)
        assert nodes is not None
        ranks = spec.local_world_size
        settings = CoordinatorSettings.from_env(nodes=nodes, ranks=ranks)
        try:
            node = RecoveryNode(
                address, ranks=ranks, min_workers=settings.min_workers, timeout=JOIN_TIMEOUT
            )
            newest = node.newest()
            if newest.number < 0 or newest.ends or node.is_over():
                return False
            number = node.join()
        except RuntimeError as error:  # of the store
            log.info("recovery: no job to join at %s: %s", address, error)
            return False
        self._node, self._is_recovering = node, True
        group: Any = worker_group  # torch's types are those of None
        group.store, group.group_rank, group.group_world_size = rendezvous_store, number, 1
        group.master_addr, _, group.master_port = address.rpartition(":")
        # Ranks mean nothing to workers that wait for a generation.
        group.workers = [
            Worker(rank, rank, rank, world_size=ranks, role_world_size=ranks)
            for rank in range(ranks)
        ]
        log.warning("recovery: node %d joins a job at generation %d", number, newest.number)
        return True

    def _close_recovery(self) -> None:
        if self._node is not None:
            self._left = self._node.address
        if self._host is not None:
            with suppress(RuntimeError):
                if self._is_recovering and (
                    rendezvous_store := _rendezvous_store(self._worker_group.spec)
                ):
                    rendezvous_store.set(_key(self._worker_group.spec), "")
            self._host.close()
        self._host, self._node, self._is_recovering = None, None, False

    def _set_local_rank_env(
        self, worker_env: dict[str, str | None], local_rank: int, spec: WorkerSpec
    ) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        if self._node is not None:
            worker_env.update(self._node.start(local_rank))

    def _watch(self, worker_group: WorkerGroup) -> RunResult:
        try:
            if not self._is_recovering and self._node is not None:
                self._is_recovering = self._node.newest().number >= 0
                if (
                    self._is_recovering
                    and self._host
                    and (rendezvous_store := _rendezvous_store(worker_group.spec))
                ):
                    rendezvous_store.set(_key(worker_group.spec), self._host.address)
            if self._is_recovering:
                return self._recover(worker_group)
        except RuntimeError as error:  # of the store; there is no other base class
            if self._is_recovering:
                return self._end_without_store(worker_group, error)
            self._close_recovery()  # the script may know nothing of it
        return super()._watch(worker_group)

    def _is_planned(self, codes: Sequence[int]) -> bool:
        if not self._is_recovering:
            return super()._is_planned(codes)
        return all(code in (0, EXIT_RESTART) for code in self._ended.values())

    def _costs_nothing(self, outcomes: Sequence[Outcome]) -> bool:
        return super()._costs_nothing(outcomes) or self._has_lost_store

    def _recover(self, worker_group: WorkerGroup) -> RunResult:
        """Watch processes, and replace them, until all have ended or have to be restarted."""
        assert self._node is not None
        store_at = nodes_at = cpu_at = 0.0
        while True:
            now = time.monotonic()
            self._starts.look()
            for local_rank, handler in self._running():
                if (code := handler.proc.poll()) is not None:
                    self._note_end(local_rank, handler, code)
                    store_at = now
            if any(code in ALL_STOP for code in self._ended.values()):
                return self._restart_all()
            if now >= store_at:
                if (result := self._look_at_store(worker_group, now)) is not None:
                    return result
                store_at = now + STORE_SECONDS
            if now >= cpu_at:
                for local_rank, _ in self._running():
                    self._node.report_cpu(local_rank)
                cpu_at = now + CPU_SECONDS
            if now >= nodes_at:
                try:
                    if worker_group.spec.rdzv_handler.num_nodes_waiting() > 0:
                        return RunResult(WorkerState.HEALTHY)  # and torch's agent asks the same
                    nodes_at = now + NODES_SECONDS
                except RendezvousError as error:
                    log.warning("recovery: the rendezvous is lost; continuing without: %s", error)
                    nodes_at = float("inf")
            time.sleep(LOOK_SECONDS)

    def _end_without_store(self, worker_group: WorkerGroup, error: RuntimeError) -> RunResult:
        if not self._running() and not any(self._ended.values()):
            return _success(worker_group)
        log.warning("recovery: the store is lost; restarting all workers: %s", error)
        self._has_lost_store = True
        return RunResult(WorkerState.FAILED, failures=self._failures())

    def _restart_all(self) -> RunResult:
        assert self._node is not None
        if why := self._node.newest().ends or (self._host.ended if self._host else ""):
            log.warning("recovery: restarting all workers: %s", why)
        return RunResult(WorkerState.FAILED, failures=self._failures())

    def _note_end(self, local_rank: int, handler: SubprocessHandler, code: int) -> None:
        assert self._node is not None
        _kill(handler)  # whom it has left behind, and closes its files
        self._ended[local_rank] = code
        worker = self._node.workers[local_rank]
        how = _how(code)
        self._node.report_end(worker, how)
        if how:
            log.warning("recovery: worker %s exited: %s", worker, how)

    def _look_at_store(self, worker_group: WorkerGroup, now: float) -> RunResult | None:
        """Do what the newest generation asks for; a result where all end."""
        assert self._node is not None
        newest, workers = self._node.newest(), self._node.workers
        if newest.ends or (self._host and self._host.ended):
            self._end_by = min(self._end_by, now + END_SECONDS)
            if now < self._end_by and self._running():
                return None
            return self._restart_all()
        if self._node.is_over():
            for _, handler in self._running():
                _kill(handler)  # newcomers that wait
            return _success(worker_group)
        for local_rank, handler in self._running():
            if reason := self._node.death_of(workers[local_rank]):
                log.warning("recovery: killing worker %s: %s", workers[local_rank], reason)
                _kill(handler)
        for local_rank, code in [*self._ended.items()]:
            name = str(workers[local_rank])
            # After the others have a generation: they need the processor more than imports do, and
            # if there can be none all are restarted anyway.
            if code == 0 or name in newest.members or name in self._node.refused:
                continue
            if self._remaining_restarts == 0:
                log.warning("recovery: max_restarts is reached; worker %s is not replaced", name)
                return RunResult(WorkerState.FAILED, failures=self._failures())
            if self._starts.are_late:
                continue
            if newest.number > self._counted:  # one outage, however many workers it has ended
                self._counted = newest.number
                self._end_if_stuck(outcomes_of(self._failures().values()))
            if self._is_stuck:
                return self._restart_all()
            self._remaining_restarts -= 1
            self._replace(worker_group.workers[local_rank])
        return None

    def _replace(self, worker: Worker) -> None:
        """Start the next process in the place of one that has ended."""
        assert self._node is not None
        local_rank, context = worker.local_rank, self._context
        environment = context.envs[local_rank]
        environment.update(self._node.start(local_rank))
        if context.error_files[local_rank] != os.devnull:
            with suppress(FileNotFoundError):
                os.unlink(context.error_files[local_rank])
        handler = WorkerProcess(
            starts=self._starts,
            appends=True,
            entrypoint=context.entrypoint,
            args=context.args[local_rank],
            env=environment,
            stdout=context.stdouts[local_rank],
            stderr=context.stderrs[local_rank],
            local_rank_id=local_rank,
            numa_options=self._worker_group.spec.numa_options,
        )
        context.subprocess_handlers[local_rank] = handler
        worker.id = handler.proc.pid
        del self._ended[local_rank]
        log.warning(
            "recovery: started worker %s; %d restarts left",
            self._node.workers[local_rank],
            self._remaining_restarts,
        )

    @property
    def _context(self) -> SubprocessContext:
        assert isinstance(self._pcontext, SubprocessContext)
        return self._pcontext

    def _running(self) -> list[tuple[int, SubprocessHandler]]:
        handlers = self._context.subprocess_handlers.items()
        return [(rank, handler) for rank, handler in handlers if rank not in self._ended]

    def _failures(self) -> dict[int, ProcessFailure]:
        """Processes that have failed, by global rank."""
        failures = {}
        for worker in self._worker_group.workers:
            code = self._ended.get(worker.local_rank, 0)
            if code:
                failures[worker.global_rank] = ProcessFailure(
                    local_rank=worker.local_rank,
                    pid=worker.id,
                    exitcode=code,
                    error_file=self._context.error_files[worker.local_rank],
                )
        return failures

    def _exit_barrier(self) -> None:
        """Let the store be there until all have seen that the job is over."""
        if not self._is_recovering or self._node is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
            return
        end = time.monotonic() + END_SECONDS
        with suppress(RuntimeError):
            self._node.leave()
            while self._host and not self._node.all_have_left() and time.monotonic() < end:
                time.sleep(STORE_SECONDS)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        super()._shutdown(*args, **kwargs)
        if self._is_recovering and self._node is not None and self._pcontext is not None:
            with suppress(RuntimeError):
                for local_rank, _ in self._running():
                    self._node.report_end(self._node.workers[local_rank], "its launcher ends it")
        self._close_recovery()


def _how(code: int) -> str:
    """The signal or exit code that has ended a process; empty for exit code 0."""
    if code < 0:
        return {number.value: number.name for number in signal.Signals}.get(
            -code, f"signal {-code}"
        )
    return f"exit code {code}" if code else ""


def _kill(handler: SubprocessHandler) -> None:
    """Kill a process, stopped or not, and those that it has started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(handler.proc.pid, signal.SIGKILL)
    close_output(handler)


def _rendezvous_store(spec: WorkerSpec) -> Store | None:
    """The store of a rendezvous that nodes can join."""
    handler = spec.rdzv_handler
    if isinstance(handler, DynamicRendezvousHandler) and handler.settings.max_nodes > 1:
        store: Store = store_of_rendezvous(handler)
        return store
    return None


def _key(spec: WorkerSpec) -> str:
    return f"lightning_dist/recovery/{spec.rdzv_handler.get_run_id()}"


def _success(worker_group: WorkerGroup) -> RunResult:
    values = {worker.global_rank: None for worker in worker_group.workers}
    return RunResult(WorkerState.SUCCEEDED, return_values=values)


def _nodes(spec: WorkerSpec, nodes: int) -> tuple[int, int] | None:
    """Fewest and most nodes; None where recovery cannot be: a static rendezvous of several."""
    settings = getattr(spec.rdzv_handler, "settings", None)
    if settings is not None:
        return settings.min_nodes, settings.max_nodes
    return (1, 1) if nodes == 1 else None
