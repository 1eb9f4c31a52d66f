"""Transfer: weights from one grid to another, any number of times, and checks of its arguments."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from commgrid.collectives.objects import Answer, Value, at_first
from commgrid.collectives.plain import all_reduce
from commgrid.equality.lost_numbers import refuse_lost
from commgrid.errors import CommGridError, PeerFailedError, SpecError, TransferError
from commgrid.grid_pairs.pair_group import PairGroup
from commgrid.grid_pairs.pairing import Pairing, check_alive, numbered
from commgrid.layout.ranks import whole_number
from commgrid.rendezvous.op import StoreLostError
from commgrid.rendezvous.timeouts import Seconds, as_seconds, timeouts
from commgrid.resharding.local_boxes import LocalBoxes, refuse_shared_memory
from commgrid.resharding.naming import Rename
from commgrid.resharding.plan import Message, TransferPlan
from commgrid.resharding.transport import Carrier, most_of
from commgrid.runtime.grid import HyperCommGrid
from commgrid.runtime.named_failures import GoneError, no_answer_of
from commgrid.store.search import first_line
from commgrid.torch_compat.peer_errors import as_peer_error, is_peer_failure, is_store_gone
from commgrid.transfer.barriers import TransferBarriers
from commgrid.transfer.conversion import Conversion, conversions
from commgrid.transfer.models import (
    Model,
    Names,
    OfBoth,
    Only,
    grids_of,
    optimizers_of,
    other_world,
)
from commgrid.transfer.outline import Outline
from commgrid.transfer.shared_boxes import lost_between
from commgrid.transfer.shared_devices import shared_devices
from commgrid.transfer.sides import SourceSide, TargetSide
from commgrid.transfer.verification import verify as verify_run

COPIES = ("compare", "any")
_TIMEOUT = 600.0
_NOTHING = "nothing was moved; make a new Transfer"
_UNCHANGED = "the target is as it was; make a new Transfer"
_UNUSABLE = "the target is not to be used: some of its tensors may be new and others old"


class Transfer:
    """Weights from one grid to another: planned once, moved as often as they change.

    Made on every rank of both grids at once, and on no others; the grids may be the same, overlap,
    or have separate ranks, of any number. As in checkpoints, tensors have boxes, so that any cut of
    a model goes to any other: the target is as if it had loaded a checkpoint that the
    source has saved, but for extra states of modules, which stay.

    Args:
        source: a module, a stage's list of chunks, or a mapping of names to tensors, which are
            whole, DTensors, or `Part(tensor, shape, offset)`; None on ranks that have none.
        target: likewise; its tensors are written in place.
        source_grid: where the source lies; None: the default grid where `source` is given, else
            this rank is in none.
        target_grid: where the target lies, likewise.
        optimizer: the source's and the target's optimizer, or list of them, whose state is moved
            too; None: weights alone.
        rename: the target's names of the source's tensors: a mapping, or a function of one name,
            which returns None for a tensor that is not moved; or `mapping(…)`, where tensors are
            fused or stacked otherwise.
        only: which of the target's names are moved: patterns as `blocks.*`, or a function; without
            it both sides have the same.
        copies: "compare" refuses a source of whose copies any bit differs, before anything moves;
            "any" sends one of them without comparing. Of mappings those are copies that are
            the same box of a name, so that a slice given as a whole tensor is refused.
        padded: by the target's names, how many entries along dim 0 are no padding, such as rows of
            a vocabulary, where one side has more; the target's padding becomes zero.
        convert: converts tensors on their way out of the source, in every run: a function of the
            target's name and a whole tensor; a `Convert`, as `Fp8Blocks`, which says in which
            blocks it computes; or several, of which the first that converts a tensor is used. All
            ranks of the source give it. A rank keeps about `max_bytes` of results, or those of
            one tensor, and during a run the blocks that cuts split.
        max_bytes: of buffers on a rank at once, about; larger ones travel in parts. The same on all
            ranks.
        staged: whether to receive beside the target, and to copy when all ranks have everything: a
            run that fails leaves the target as it was. This takes the memory of the target's
            tensors once more, while it runs. The same on all ranks.
        timeout: seconds to wait for other ranks; None: the grid's, or 600.
        name: tells transfers between different grids from each other.
        store: where another program is met, which has a torch.distributed of its own: a
            `torch.distributed.TCPStore` or `FileStore` that all ranks of both programs reach, and
            that outlives the engine's. Each program gives its own side alone. None: both grids are
            of one program.
        peer: what this program calls the other one in messages.

    Attributes:
        plan: the messages between ranks.

    Raises:
        TransferError: on all ranks: the sides differ in names or shapes, or what a rank gave
            cannot be moved; names parameter and ranks.
        PeerTimeoutError: a rank did not call; names it.
        GridMismatchError: ranks were given different max_bytes or staged.
        GridDestroyedError, GridNotInitializedError: a grid was destroyed, or its torch.distributed
            has ended.
        SpecError: neither side was given, or options that mean nothing.

    Example:
        >>> import commgrid, torch
        >>> grid = commgrid.initialize()
        >>> model, served = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1, dtype=torch.bfloat16)
        >>> transfer = Transfer(model, served, source_grid=grid, target_grid=grid)
        >>> transfer.run()
        >>> torch.equal(served.weight, model.weight.bfloat16())
        True
        >>> commgrid.shutdown()
    """

    plan: TransferPlan

    def __init__(
        self,
        source: Model | None,
        target: Model | None,
        *,
        source_grid: HyperCommGrid | None = None,
        target_grid: HyperCommGrid | None = None,
        optimizer: OfBoth | None = None,
        rename: Rename | None = None,
        only: Only | None = None,
        padded: Mapping[str, int] | None = None,
        convert: Conversion | None = None,
        copies: str = "compare",
        max_bytes: int = 1 << 28,
        staged: bool = False,
        timeout: Seconds | None = None,
        name: str = "default",
        store: Any = None,
        peer: str | None = None,
    ) -> None:
        max_bytes = whole_number("max_bytes", max_bytes)
        if copies not in COPIES:
            raise SpecError(f"copies={copies!r}: expected one of {', '.join(COPIES)}")
        self._grids = grids_of(source, target, source_grid, target_grid)
        elsewhere = other_world(store, peer, self._grids)
        given = [grid.timeout for grid in self._grids.values() if grid.timeout is not None]
        most = max(given, default=_TIMEOUT)
        self._timeout = as_seconds("timeout", most if timeout is None else timeout)
        self._max_bytes, self._broken, self._runs = max_bytes, "", 0
        self._staged = staged
        self._name, self._legend = name, ""
        self._nothing = LocalBoxes()
        self._messages: dict[TransferPlan, list[Message]] = {}  # the same in every run
        self._carriers: dict[TransferPlan, Carrier] = {}
        names = Names(rename, only, padded)
        ours, theirs = optimizers_of(optimizer, rename=rename, only=only, convert=convert)
        self._source = SourceSide(
            source, self._grids.get("source"), ours, names, conversions(convert), max_bytes
        )
        self._target = TargetSide(target, self._grids.get("target"), theirs, names)
        with self._numbered(), Pairing(
            "transfer", name, self._grids, {"max_bytes": max_bytes, "staged": staged},
            time.monotonic() + self._timeout, phases=("made",), limit="timeout",
            elsewhere=elsewhere, watch=True,
        ) as pair:  # fmt: skip
            self._legend, self._store = pair.legend, pair.numbering.store
            self._barriers = TransferBarriers(pair.key, pair.numbering, pair.ranks, pair.leftovers)
            self._sharing = shared_devices(self._barriers, pair.backend, self._timeout)
            self._pair_group = PairGroup(
                pair, f"transfer {name!r}", pair.ranks, self._grids.values(),
                backend=self._sharing.backend, timeout=self._timeout, told=self._barriers.interrupt,
            )  # fmt: skip
            self._group = self._pair_group.group
            self._close = weakref.finalize(self, _end, self._pair_group, self._barriers)
            self._close.atexit = False  # which could wait for ranks that have ended
            for grid in self._grids.values():
                grid.before_destroy(self._close)
            try:
                pair.meet()
                self._pair_group.connect_watch()
                self._outline = Outline.of(
                    self._source, self._target, self._group, pair.ranks, copies == "compare"
                )
                self.plan = self._outline.plan
                self._barriers.come("planned", self._timeout, "did not get as far as its plan")
                self._pair_group.begin()
            except BaseException as error:
                told = self._fail("planned", error)
                self.close()
                if isinstance(error, Exception) and told is not error:
                    raise told from error
                raise

    # -- moving -------------------------------------------------------------------------

    @property
    def broken(self) -> str:
        """The error that ended a run in the middle, so that the target cannot be used; "": none."""
        return self._broken

    def run(self, verify: bool = False) -> None:
        """Moves the source's numbers into the target's tensors; on all ranks of both grids.

        Nothing moves before all ranks have come and checked that their tensors fit the plan.

        Args:
            verify: whether to compare digests of the target's tensors with those of the source's
                numbers, converted to the target's dtypes; on all ranks if one of them asks for it.

        Raises:
            TransferError: on all ranks: a model has changed since it was planned, copies of a
                tensor differ, or a run before this one was ended by an error. Nothing was moved.
                Or `verify` has found a difference, and the target is not to be used.
            PeerTimeoutError: a rank did not come; names it. Nothing was moved. Where a grid is
                watched that ends this transfer.
            PeerFailedError: a rank failed or is gone in the middle, as it names. The target is not
                to be used, unless the run was `staged`; neither is this transfer.
            GridDestroyedError, GridNotInitializedError: a grid was destroyed, or its
                torch.distributed has ended.
        """
        with self._numbered():
            self._run(verify)

    def _run(self, verify: bool) -> None:
        self._runs += 1
        start, self._barriers.next = f"run {self._runs}", f"run {self._runs + 1}"
        try:
            self._prepare()
        except BaseException as error:
            self._fail(start, error)
            raise
        try:
            self._barriers.come(start, self._timeout, "did not call run() of a transfer")
        except CommGridError as error:
            if self._barriers.interrupted:
                raise self._ended(error, _NOTHING) from error
            raise
        except RuntimeError as error:  # the store is lost
            raise self._ended(self._fail(start, error), _NOTHING) from error
        barrier, consequence = f"{start} is done", _NOTHING
        try:
            verify = self._compare_copies(verify)
            self._bring_together()
            self._check_numbers()
            values = self._exchange_values()
            consequence = _UNCHANGED if self._staged else _UNUSABLE
            source = self._source.sending or self._nothing
            received = target = self._target.held or self._nothing
            if self._staged:
                received = target.beside()
            else:
                self._target.clear_padding()
            self._carry(self.plan, source, received)
            self._barriers.come(barrier, self._timeout, "did not finish a transfer")
            consequence = _UNUSABLE
            if self._staged:
                self._target.clear_padding()
                target.take(received)
            if verify:
                barrier = f"{start} is verified"
                ranks = self._barriers.rank, self._group, self._outline.device
                verify_run(self.plan, self._outline.target, source, target, *ranks)
                self._barriers.come(barrier, self._timeout, "did not verify a transfer")
            self._target.finish(values)
        except BaseException as error:
            if consequence is _UNCHANGED and is_store_gone(error):  # others may have gone on
                consequence = _UNUSABLE
            told = self._ended(self._fail(barrier, error), consequence)
            if not isinstance(error, Exception):
                raise
            raise told from error
        finally:
            if self._source.sent is not None:
                self._source.sent.end()

    def _bring_together(self) -> None:
        """Fetches what others hold of the blocks that this rank converts."""
        if self._outline.blocks is not None:
            held, sent = self._source.held or self._nothing, self._source.sent
            split = sent.begin() if sent is not None else self._nothing
            self._carry(self._outline.blocks, held, split)

    def _carry(self, plan: TransferPlan, source: LocalBoxes, target: LocalBoxes) -> None:
        """Carries out a plan, and waits until all ranks have done so.

        Buffers and messages of one run serve the next where the tensors are still the same.
        """
        rank, sharing = self._barriers.rank, self._sharing
        if plan not in self._messages:
            self._messages[plan] = plan.messages(rank, most_of(self._max_bytes))
        carrier = self._carriers.get(plan)
        if carrier is None or not carrier.holds(source, target):
            carrier = Carrier(
                self._group, self._barriers.ranks, self._outline.device, source, target,
                self._max_bytes, self._messages[plan], partial(plan.copies, rank), self._timeout,
                sharing.ranks, sharing.device,
            )  # fmt: skip
            if source.is_lasting and target.is_lasting:
                self._carriers[plan] = carrier
        carrier.carry()
        carrier.meet()

    def _prepare(self) -> None:
        """Check that this rank's tensors are as they were planned."""
        if self._broken:
            advice = "" if "make a new Transfer" in self._broken else "; make a new Transfer"
            raise TransferError(f"an earlier run has ended: {self._broken}{advice}")
        for grid in self._grids.values():
            check_alive("transfer", grid)
        if not self._close.alive:
            raise TransferError("this transfer was closed; make a new one")
        planned = (self._source, self._outline.source), (self._target, self._outline.target)
        for side, plan in planned:
            held = side.hold()
            if held is not None:
                place = plan.places[self._barriers.rank]
                if not plan.is_still(place, held.layout):
                    raise TransferError(
                        f"the {side.what} on rank {self._barriers.rank} has changed since the "
                        f"transfer was planned: {plan.difference(place, held.layout)}; make a "
                        "new Transfer"
                    )
        refuse_shared_memory(self._source.held, self._target.held)

    def _compare_copies(self, verify: bool) -> bool:
        """Refuses to send one of several copies that differ; what all agree on is one number.

        Args:
            verify: whether this rank asks to verify the run.

        Returns:
            Whether one of the ranks does.
        """
        if self._outline.has_twins:
            self._agree(self._source.compare_twins, lambda _: None)
        shared = self._outline.shared
        if shared is None:
            if self._outline.has_members:
                self._agree(self._source.compare_members, lambda _: None)
            asked = torch.tensor([verify], dtype=torch.int32, device=self._outline.device)
            return bool(all_reduce(asked, self._group, op="max"))
        differ, verify, failed = shared.seem_to_differ(self._source.held, verify)
        if not differ:
            return verify

        def tell() -> None:
            if failed is not None:
                raise failed

        self._agree(tell, lambda _: None)
        self._agree(lambda: self._source.compare_copies(shared), lambda _: None)
        return verify

    def _check_numbers(self) -> None:
        """Refuse numbers that the target's dtypes do not hold."""
        outline = self._outline
        sides = outline.sent.side, outline.target
        found = lost_between(self._source.sending, *sides, self._group, outline.device)
        if found:
            self._agree(lambda: refuse_lost(found, TransferError), lambda _: None)

    def _exchange_values(self) -> dict[str, Any]:
        """The optimizers' values that are no tensors, of all ranks; {}: no optimizer is moved."""
        if not self._target.wants:
            return {}

        def merged(values: list[dict[str, Any]]) -> dict[str, Any]:
            return {key: value for one in values for key, value in one.items()}

        values = self._agree(lambda: self._source.values, merged)
        self._agree(lambda: self._target.begin(values), lambda _: None)
        if self._outline.all_offer:
            self._agree(self._source.check_values, lambda _: None)
        return values

    def _agree(self, mine: Callable[[], Value], whole: Callable[[list[Value]], Answer]) -> Answer:
        """`at_first`, whose error leaves no rank before all have heard it.

        NCCL may still be sending it where it was raised, and ending the group would cut it off.
        """
        try:
            return at_first(self._group, mine, whole, TransferError)
        except TransferError:
            with suppress(CommGridError):
                self._barriers.come(
                    f"run {self._runs} is refused", timeouts().arrive, "did not hear why"
                )
            raise

    @contextmanager
    def _numbered(self) -> Iterator[None]:
        """Errors within it say whose ranks their numbers are, where two programs are numbered."""
        try:
            yield
        except CommGridError as error:
            told = numbered(error, self._legend)
            if told is error:
                raise
            raise told from error

    # -- ending -------------------------------------------------------------------------

    def _fail(self, barrier: str, error: BaseException) -> BaseException:
        """Tells the others; what then is the error of all."""
        me = f"rank {self._barriers.rank}"
        if isinstance(error, StoreLostError):
            error = error.__cause__ or error
        kind, told = "failed", f"{me} failed: {type(error).__name__}: {first_line(error)}"
        if isinstance(error, GoneError) or is_peer_failure(error):
            kind = "gone"
            learnt = self._pair_group.failure(timeouts().seen)
            if learnt is not None:
                kind, told = "absent" if self._pair_group.is_late else "gone", learnt
            elif is_store_gone(error):
                kind, told = (
                    "absent",
                    f"{as_peer_error(f'transfer {self._name!r}', error, self._store)}",
                )
            elif isinstance(error, GoneError):
                told = f"{error}"
                self._barriers.absent_after_failure(barrier, error.rank)
            else:
                missing = self._barriers.absent_after_failure(barrier, None)
                if len(missing) > len(self._barriers.ranks) // 2:
                    missing = set()  # who would be gone is rather still on its way here
                told = f"{no_answer_of(missing)}: {me} got {first_line(error)}"
        elif isinstance(error, CommGridError):
            told = f"{error}"
        stands = self._barriers.fail(barrier, kind, told)
        if kind == "failed" and not isinstance(error, CommGridError):
            self._pair_group.post(told)
        return stands if stands is not None and str(stands) != str(error) else error

    def _ended(self, error: BaseException, consequence: str) -> CommGridError:
        """Ends the transfer; what that is an error of on this rank."""
        self._broken = f"{error} (in transfer {self._name!r}); {consequence}"
        self.close(broken=True)
        kind = type(error) if isinstance(error, CommGridError) else TransferError
        return (PeerFailedError if kind is GoneError else kind)(self._broken)

    def close(self, broken: bool = False) -> None:
        """Ends the transfer's communicator; the grids' end does it too.

        Args:
            broken: whether something may be under way, which is not waited for.
        """
        if broken and self._close.detach():
            _end(self._pair_group, self._barriers, broken=True)
        self._close()


def _end(pair_group: PairGroup, barriers: TransferBarriers, broken: bool = False) -> None:
    pair_group.end(broken)
    barriers.close()
