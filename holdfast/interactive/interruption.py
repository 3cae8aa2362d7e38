"""Ctrl-C during a run that was started from Python: the committed rounds stay, and the caller gets them."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Whether Ctrl-C was pressed once, so that what there is can be returned. A second time raises."""

    def __init__(self) -> None:
        self.pressed = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.pressed += 1
        raise KeyboardInterrupt


@contextmanager
def stoppable(advice: Callable[[], str], saved: Callable[[], bool] = lambda: True) -> Iterator[Interruption]:
    """Run what is within until it ends or Ctrl-C is pressed. The first Ctrl-C ends it and prints `advice`, if
    something is `saved`; otherwise, and for a second one while it is being closed, KeyboardInterrupt is
    raised."""
    interruption = Interruption()
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:  # a handler of the caller's own stays
        signal.signal(signal.SIGINT, interruption.handle)
    try:
        yield interruption
    except KeyboardInterrupt:
        if interruption.pressed > 1:
            raise
        if not saved():
            raise KeyboardInterrupt("no round was finished, so nothing was saved") from None
        interruption.pressed = 1
        print(f"interrupted; {advice()}", file=sys.stderr)
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
