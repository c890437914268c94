"""Standard input, output and error of the process: a program may be started without them."""

import os
import sys

STREAMS = (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w"))


def open_standard_streams() -> None:
    """Let those that are closed (``2>&-``) be nothing's.

    Otherwise the next file or connection that is opened would have their number, and what is
    started would write its errors into it.
    """
    for name, number, mode in STREAMS:
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
