"""Which of many tests are run: the same ones on every machine."""

import zlib


def part(text):
    """``(k, n)`` of ``3/8``; the k may also be the hash of a commit, of which it is the remainder."""
    k, _, n = text.partition("/")
    number = int(k, 10 if len(k) < 7 else 16)
    return number % int(n), int(n)


def part_of(nodeid, parts):
    """Which part of the slow tests a test belongs to: the same on every machine."""
    return zlib.crc32(nodeid.encode()) % parts


def covering(combinations):
    """Numbers of combinations ``{parameter: value}`` in which every value occurs: each time the one with most new."""
    values = [
        {(key, repr(value)) for key, value in combination.items()} for combination in combinations
    ]
    missing = set().union(*values)
    kept = []
    while missing:
        kept.append(max(range(len(values)), key=lambda k: (len(values[k] & missing), -k)))
        missing -= values[kept[-1]]
    return set(kept)


def spread(length, count, name):
    """``count`` numbers below ``length``, far from each other; each name begins at another one."""
    first = zlib.crc32(name.encode())
    return {(first + k * length // count) % length for k in range(count)}
