"""What messages should not show: found in each one that a test raises, built with its real arguments."""

import functools
import importlib
import pathlib
import re
import types

import xmap_compat

PACKAGE = pathlib.Path(xmap_compat.__file__).parent
MODULES = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in PACKAGE.rglob("errors.py")]

# Places where an argument was empty, or a part is missing.
_HOLES = re.compile(r"\S  +\S| [,;.](?!\.)(\s|$)|[,:;] ?[,;.](?!\.)|\( | \)|``|:\s*$")
_QUOTED = re.compile(r"(?<!\w)'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]+`")
_PAIRS = {")": "(", "]": "[", "}": "{"}


def faults(text):
    """Double spaces, empty lists and stray brackets in a message, beside what it quotes or shows on its own lines."""
    plain = _QUOTED.sub("x", text.split("\nLegacy's words")[0].split("\n  ")[0])
    found = [hole.group() for line in plain.splitlines() if (hole := _HOLES.search(line.strip()))]
    open_ones = []
    for sign in re.findall(r"[()\[\]{}]", plain):
        if sign not in _PAIRS:
            open_ones.append(sign)
        elif not open_ones or open_ones.pop() != _PAIRS[sign]:
            return [*found, sign]
    return [*found, *open_ones]


def watch_messages(told):
    """Have each message that the package makes looked through; those with faults are appended to ``told``."""
    for name in MODULES:
        module = importlib.import_module(".".join(name))
        for key, function in list(vars(module).items()):
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                setattr(module, key, _watched(function, told))


def _watched(function, told):
    @functools.wraps(function)
    def watched(*args, **kwargs):
        made = function(*args, **kwargs)
        if isinstance(made, Exception) and (found := faults(str(made))):
            told.append((function.__name__, found, str(made)))
        return made

    return watched
