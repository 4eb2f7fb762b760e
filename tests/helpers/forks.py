"""Programs that share one import of JAX: a process imports it, with no backend, and forks for each of them.

A fork runs what ``python ARGS`` or ``python -m xmap_compat ARGS`` runs, and ends as they end.  What depends on the
order of imports, or on what a program sets before it imports JAX, needs a process of its own (``subprocesses.run``).
"""

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings

SECONDS = 200
# Variables of the cache of compiled programs: without their lines, which are those of new folders.
CACHE = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_")


def run(*arguments, cwd, plain=False, warn="error", **variables):
    """The end of a program under ``python -m xmap_compat`` (or plain Python), with warnings as errors or ignored."""
    return _ask(
        "plain" if plain else "program",
        list(map(str, arguments)),
        os.path.abspath(cwd),
        warn,
        variables,
    )


def release_and_lacking(names):
    """What ``facts.release_and_lacking`` of the package answers, in a fork in place of a process that imports JAX."""
    done = _ask("facts", sorted(names), os.getcwd(), "ignore")
    release, lacking = json.loads(done.stdout)
    return release, set(lacking)


def _ask(kind, content, cwd, warn, variables=None):
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("out", "err")]
        request = {
            "kind": kind,
            "content": content,
            "cwd": cwd,
            "warn": warn,
            "files": files,
            "variables": variables or {},
        }
        server = _server()
        print(json.dumps(request), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        texts = []
        for path in files:
            with open(path) as file:
                texts.append(file.read())
    return subprocess.CompletedProcess(content, code, *texts)


def inherited():
    """The variables of this process; of the tests' own settings of JAX only the cache of compiled programs."""
    own = ("JAX_", "XLA_", "PYTEST_")
    return {k: v for k, v in os.environ.items() if k.startswith(CACHE) or not k.startswith(own)}


@functools.cache
def _server():
    environment = {**inherited(), "JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", __file__]
    server = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server


# --------------------------------------------------------------------------- in that process


def _requests():
    """Returns in a fork, with its request; ends in the server with its input."""
    for line in sys.stdin:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


def _become(request):
    signal.alarm(SECONDS)
    os.environ.update(request["variables"])
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" in request["variables"]:  # JAX has read its variables
        importlib.import_module("jax").config.update("jax_disable_most_optimizations", True)
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    for number, path in enumerate([os.devnull, *request["files"]]):
        opened = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
    sys.stdin = os.fdopen(0, closefd=False)
    warnings.simplefilter(request["warn"])


def _serve():
    importlib.import_module("xmap_compat.legacy.restore")  # and with it JAX
    from xmap_compat.__main__ import main
    from xmap_compat.legacy import runner

    # Forks neither look through what is there for garbage nor copy it.
    gc.collect()
    gc.freeze()
    request = _requests()
    _become(request)
    content = request["content"]
    if request["kind"] == "plain":
        return runner.run_program(content)
    if request["kind"] == "facts":
        _print_facts(content)
    if content[0] == "leave":
        _facts().release_and_lacking = _facts()._answer  # this is a new process already
    return main(content)


def _facts():
    return importlib.import_module("xmap_compat.tools.check.facts")


def _print_facts(names):
    release, lacking = _facts()._answer(names)
    print(json.dumps([release, sorted(lacking)]), flush=True)
    os._exit(0)  # nothing of it needs to be taken down


if __name__ == "__main__":
    sys.exit(_serve())
