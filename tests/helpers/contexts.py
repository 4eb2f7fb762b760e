"""One MLIR context for several programs of a thread, as in JAX 0.12: an older release takes 3 ms to make each."""

import threading

from jax._src.interpreters import mlir

PROGRAMS = 10  # of one context, as in JAX: it keeps each type and location of theirs


class _OfThread(threading.local):
    left = 0


def share_contexts():
    """Have this JAX make fewer contexts, unless it shares them itself."""
    if hasattr(mlir, "_create_ir_context"):
        return
    make, here = mlir.make_ir_context, _OfThread()

    def shared():
        if mlir.ir.Context.current is not None:  # a program is lowered within another
            return make()
        if not here.left:
            here.context, here.left = make(), PROGRAMS
        here.left -= 1
        return here.context

    mlir.make_ir_context = shared
