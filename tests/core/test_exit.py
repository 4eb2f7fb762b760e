"""What is still entered when Python ends raises nothing and prints nothing: one process for each way to enter."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, contextlib, threading
import jax, xmap_compat
mesh = xmap_compat.Mesh(jax.devices(), "x")
installation = xmap_compat.install()
jax_mesh = jax.sharding.Mesh(jax.devices()[:1], "y")
contexts = [mesh, jax_mesh, installation, xmap_compat.serial_loop("l", 2)]

def suspended(context):
    with context:
        yield

async def waiting(context):
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(context)
        await asyncio.Event().wait()

def wait_in(context, entered):
    with context:
        entered.set()
        threading.Event().wait()

kept = []
for context in contexts:
"""
WAYS = {
    "a suspended generator": "kept.append(suspended(context)); next(kept[-1])",
    "a generator of another thread": """
    kept.append(suspended(context))
    thread = threading.Thread(target=next, args=(kept[-1],)); thread.start(); thread.join()""",
    "a generator in a cycle": "made = suspended(context); next(made); cycle = [made]; cycle.append(cycle); del made",
    "a coroutine": "kept.append(asyncio.new_event_loop()); task = kept[-1].create_task(waiting(context)); "
    "kept[-1].call_soon(kept[-1].stop); kept[-1].run_forever(); kept.append(task)",
    "an ExitStack": "kept.append(contextlib.ExitStack()); kept[-1].enter_context(context)",
    "enter without exit": "context.__enter__()",
    "a decorator": """
    if isinstance(context, contextlib.ContextDecorator):
        kept.append(context(lambda: next(suspended(jax_mesh)))); kept[-1]()""",
    "a daemon thread": """
    entered = threading.Event()
    threading.Thread(target=wait_in, args=(context, entered), daemon=True).start(); entered.wait()""",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_entered_when_python_ends_is_silent(way):
    program = f"{PROGRAM}    {WAYS[way].strip()}\nprint('end')"
    # asyncio itself tells of tasks that are pending.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    told = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith(("Task was destroyed", "task: <Task"))
    ]
    assert (done.returncode, done.stdout, told) == (0, "end\n", [])
