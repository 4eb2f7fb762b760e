"""The tests under each supported pair of Python and JAX, and the lint.

``python -m nox`` runs everything, ``python -m nox -s smoke`` a few files with each pair, ``python -m nox -l`` lists
the sessions.  What comes after ``--`` goes to pytest.
"""

import nox

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
SMOKE = ["tests/test_walking_skeleton.py", "tests/tutorial/test_tutorial_network.py", "tests/test_mesh.py"]


def install_and_test(session, jax, *args):
    release = ["--upgrade", "jax", "jaxlib"] if jax == "newest" else [f"jax=={jax}", f"jaxlib=={jax}"]
    session.install("-e", ".[test]", *release)
    session.run("python", "-m", "pytest", "-n", "2", *args, *session.posargs)


@nox.session
@nox.parametrize("python,jax", PAIRS)
def tests(session, jax):
    """The whole suite."""
    install_and_test(session, jax)


@nox.session
@nox.parametrize("python,jax", PAIRS)
def smoke(session, jax):
    """The first function, the tutorial's network and the mesh."""
    install_and_test(session, jax, *SMOKE)


@nox.session(python="3.11")
def lint(session):
    """Style and types."""
    session.install("-e", ".[lint]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
