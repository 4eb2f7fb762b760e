"""The tests under each supported pair of Python and JAX, and the lint.

``python -m nox`` runs the lint and the quick tests with each pair; ``python -m nox -l`` lists the other sessions, and
``-s`` chooses.  What comes after ``--`` goes to pytest.  Times are those of two cores.
"""

import nox
from nox.command import CommandFailed

nox.options.sessions = ["lint", "tests"]

PAIRS = [
    nox.param(python, jax, id=f"python {python}, jax {jax}")
    for python, jax in [
        ("3.11", "0.10.0"),
        ("3.11", "0.10.2"),
        ("3.12", "0.11.0"),
        ("3.12", "newest"),
        ("3.13", "newest"),
    ]
]
NIGHTLY = "https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/"
SMOKE = ["tests/core/test_walking_skeleton.py", "tests/tutorial/test_tutorial_network.py", "tests/core/test_mesh.py"]


def install_and_test(session, jax, *args, **environment):
    release = ["--upgrade", "jax", "jaxlib"] if jax == "newest" else [f"jax=={jax}", f"jaxlib=={jax}"]
    session.install("-e", ".[test]", *release)
    session.run("python", "-m", "pytest", "-n", "2", *args, *session.posargs, env=environment)


@nox.session
@nox.parametrize("python,jax", PAIRS)
def tests(session, jax):
    """The quick tests, which see every kind of behaviour (8 minutes for each pair)."""
    install_and_test(session, jax)


@nox.session
@nox.parametrize("python,jax", PAIRS)
def smoke(session, jax):
    """The first function, the tutorial's network and the mesh (a minute for each pair)."""
    install_and_test(session, jax, *SMOKE)


@nox.session
@nox.parametrize("python,jax", PAIRS)
def full(session, jax):
    """The slow tests too, and all cells of the matrix (1.5 hours for each pair): weekly, and for releases."""
    install_and_test(session, jax, "--slow", XMAP_COMPAT_MATRIX="1")


@nox.session(python="3.12")
def mutants(session):
    """Edits of the package that a test must find, on the newest JAX (an hour); ``-- 3/8`` tries a part of them."""
    session.install("-e", ".[test]", "--upgrade", "jax", "jaxlib")
    session.run("python", "tests/mutants.py", *session.posargs)


@nox.session(python="3.12")
def nightly(session):
    """The quick tests on JAX's newest pre-release, if one can be installed."""
    session.install("-e", ".[test]")
    try:
        session.install("--pre", "--upgrade", "jax", "jaxlib", "--extra-index-url", NIGHTLY)
    except CommandFailed:
        session.skip("no pre-release of JAX can be installed here")
    session.run("python", "-c", "import jax; print('jax', jax.__version__)")
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session(python="3.11")
def lint(session):
    """Style and types."""
    session.install("-e", ".[lint]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
