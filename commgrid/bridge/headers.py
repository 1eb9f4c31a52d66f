"""Headers of a bridge's messages: the call's number, and calls whose gradient cannot be received.

Messages between two ranks arrive in the order in which they were sent. The target may run its
backwards in another order than the source, or run one more. Each message has a header:

    call │ first call that waits for its gradient │ calls whose gradient is never going to be received
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import finalize

from torch import Tensor

from commgrid.errors import CommGridError

_DROPPED = 6
LENGTH = 2 + _DROPPED
"""How many numbers a head has."""
_NONE = -1


class Owed:
    """Belongs to the autograd node of one call; freed without a backward, it tells the ledger."""

    def __init__(self, ledger: PendingGradients, call: int) -> None:
        finalize(self, ledger.drop, call).atexit = False


class PendingGradients:
    """Calls that wait for gradients here, and calls whose gradients were sent.

    Args:
        about: what messages speak of: `bridge 'images'`.
    """

    def __init__(self, about: str) -> None:
        self._about = about
        # On the source's ranks.
        self._owed: dict[int, Mapping[int, tuple[int, ...]]] = {}
        self._dropped: set[int] = set()
        self._untold: dict[int, list[int]] = {}  # dropped calls, by who would send a gradient
        self._early: dict[tuple[int, int], Tensor] = {}
        # On the target's ranks.
        self._sent: dict[int, set[int]] = {}  # receivers by call
        self._refused: set[tuple[int, int]] = set()  # call and receiver

    # -- on the source --------------------------------------------------------------------

    def owe(self, call: int, shapes: Mapping[int, tuple[int, ...]]) -> Owed:
        """Expect a gradient, as long as what is returned lives.

        Args:
            call: its number.
            shapes: of the message from each sender.
        """
        self._owed[call] = shapes
        return Owed(self, call)

    def drop(self, call: int) -> None:
        """The autograd node of a call was freed."""
        shapes = self._owed.pop(call, None)
        if shapes is not None:
            self._dropped.add(call)
            for sender in shapes:
                self._untold.setdefault(sender, []).append(call)

    def settle(self, call: int) -> None:
        """A call's gradient was received."""
        self._owed.pop(call, None)

    def head(self, call: int, target: int | None) -> list[int]:
        """Return the head of a message of a call.

        Args:
            call: its number.
            target: the rank that it goes to; None: one of the source's, which reads the call alone.
        """
        waiting = [] if target is None else self._untold.get(target, [])
        untold = waiting[:_DROPPED]
        del waiting[: len(untold)]  # a call may be dropped at any moment
        first = min([*self._owed, *waiting], default=call)
        return [call, first, *untold, *[_NONE] * (_DROPPED - len(untold))]

    def shape(self, call: int, sender: int) -> tuple[int, ...]:
        """Return the shape of a sender's gradient of a call, of which a head has come.

        Raises:
            CommGridError: this rank does not run the call's backward, or has run it.
        """
        if call in self._owed:
            return self._owed[call][sender]
        if call in self._dropped:
            raise self._unreceived(call, "this rank")
        raise CommGridError(
            f"{self._about}: rank {sender} sent a second gradient of call {call}; run backward "
            "once for each call, on all ranks of both stages"
        )

    def keep(self, call: int, sender: int, part: Tensor) -> None:
        """Keep a gradient that came before this rank's backward."""
        self._early[call, sender] = part

    def take(self, call: int, sender: int) -> Tensor | None:
        """Return what was kept, once."""
        return self._early.pop((call, sender), None)

    # -- on the target --------------------------------------------------------------------

    def hear(self, head: Sequence[int], sender: int) -> None:
        """Read the header of a message from the source.

        Raises:
            CommGridError: the sender does not receive a gradient that was sent.
        """
        _, first, *dropped = head
        for call in dropped:
            if sender in self._sent.get(call, ()):
                raise self._unreceived(call, f"rank {sender}")
            if call != _NONE:
                self._refused.add((call, sender))
        for call in [each for each in self._sent if each < first]:
            self._sent[call].discard(sender)
            if not self._sent[call]:
                del self._sent[call]

    def send(self, call: int, receivers: Sequence[int]) -> None:
        """Note that a call's gradient is sent.

        Raises:
            CommGridError: a receiver does not run the call's backward.
        """
        for receiver in receivers:
            if (call, receiver) in self._refused:
                raise self._unreceived(call, f"rank {receiver}")
            self._sent.setdefault(call, set()).add(receiver)

    def _unreceived(self, call: int, who: str) -> CommGridError:
        return CommGridError(
            f"{self._about}: the gradient of call {call} was sent, but {who} has dropped what that "
            "call returned without backward(), so that the tensor it gave gets no gradient; call "
            "backward() of the zero that source ranks get, or add it to their loss. Give "
            "x.detach() if it is to get none"
        )
