"""The tests under each supported pair of Python and JAX, and the lint.

``python -m nox`` runs the lint and the quick tests with each pair; ``python -m nox -l`` lists the other sessions, and
``-s`` chooses.  What comes after ``--`` goes to pytest.  Times are those of two cores.
"""

import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).parent / "docs"))
from for_index import for_index, home

nox.options.sessions = ["lint", "tests"]

PAIRS = [
    nox.param(python, jax, id=f"python {python}, jax {jax}")
    for python, jax in [
        ("3.11", "0.9.0"),
        ("3.11", "0.9.2"),
        ("3.11", "0.10.0"),
        ("3.11", "0.10.2"),
        ("3.12", "0.11.2"),
        ("3.12", "newest"),
        ("3.13", "newest"),
    ]
]
SMOKE = [
    *(
        "tests/core/test_walking_skeleton.py",
        "tests/tutorial/test_tutorial_network.py",
        "tests/core/test_mesh.py",
    ),
    "tests/install/test_named_types.py",
    "tests/core/test_combinations.py::test_a_root_varies_over_an_axis_that_only_its_equation_names",
]


# What "newest" was when the tests were last green; the session `newest` moves it.  Older Pythons have older releases.
NEWEST = Path(__file__).parent / ".ci" / "newest.txt"
PINNED = ["-c", str(NEWEST)] if sys.version_info >= (3, 12) else []


def install_and_test(session, jax, *args, **environment):
    release = ["-c", str(NEWEST)] if jax == "newest" else [f"jax=={jax}", f"jaxlib=={jax}"]
    session.install("-e", ".[test]", *release)
    session.run("python", "-m", "pytest", "-n", "2", *args, *session.posargs, env=environment)


@nox.session
@nox.parametrize("python,jax", PAIRS)
def tests(session, jax):
    """The quick tests, which cover every kind of behaviour (6 to 8 minutes for each pair)."""
    install_and_test(session, jax)


@nox.session
@nox.parametrize("python,jax", PAIRS)
def smoke(session, jax):
    """The first function, the tutorial's network, the mesh and install() (a minute for each pair)."""
    install_and_test(session, jax, *SMOKE)


@nox.session
@nox.parametrize("python,jax", PAIRS)
def full(session, jax):
    """The slow tests too, and all cells of the matrix (1.5 hours for each pair): weekly, and for releases."""
    install_and_test(session, jax, "--slow", XMAP_COMPAT_MATRIX="1")


@nox.session(python="3.12")
def mutants(session):
    """Edits of the package that a test must find, on the newest JAX: a random 200, or ``-- --changed BASE``.

    The first run records which tests execute which lines, as long as the quick tests take; an edit takes 3 seconds.
    """
    session.install("-e", ".[test]", "-c", str(NEWEST))
    if not Path(".pytest_cache/reach.json").exists():
        session.run("python", "tests/mutants.py", "--record")
    session.run("python", "tests/mutants.py", *(session.posargs or ["--sample", "200"]))


@nox.session(python="3.12")
def newest(session):
    """The quick tests on the newest of everything; if they are green, .ci/newest.txt and the package say so."""
    session.install("-e", ".[test,docs,lint]", "--upgrade", "--upgrade-strategy", "eager", "nox")
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)
    packages = session.run("python", "-m", "pip", "freeze", "--exclude-editable", silent=True)
    head = "".join(line for line in NEWEST.read_text().splitlines(True) if line.startswith("#"))
    NEWEST.write_text(head + packages)
    release = re.search(r"^jax==(.*)$", packages, re.MULTILINE)[1]
    version = Path("xmap_compat/_jax/version.py")
    version.write_text(
        re.sub('(?<=^NEWEST_TESTED = ")[^"]*', release, version.read_text(), flags=re.MULTILINE)
    )


@nox.session(python="3.12")
def nightly(session):
    """The quick tests on JAX's newest pre-release, if one can be installed; JAX_NIGHTLY_INDEX is one more index."""
    session.install("-e", ".[test]")
    index = os.environ.get("JAX_NIGHTLY_INDEX")
    try:
        session.install(
            "--pre", "--upgrade", "jax", "jaxlib", *(["--extra-index-url", index] if index else [])
        )
    except CommandFailed:
        session.skip("no pre-release of JAX can be installed here")
    session.run("python", "-c", "import jax; print('jax', jax.__version__)")
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session(python="3.12")
def shuffled(session):
    """The quick tests in three random orders, on the newest JAX (20 minutes); each run says its seed."""
    session.install("-e", ".[test]", "pytest-randomly", "-c", str(NEWEST))
    for _ in range(3):
        session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session(python="3.11")
def lint(session):
    """Style and types."""
    session.install("-e", ".[lint]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("pyright")
    # From elsewhere, they find the installed package by its metadata alone, as for a user.
    program = Path(session.create_tmp()).resolve() / "user_program.py"
    shutil.copy2("tests/typed/user_program.py", program)
    with session.chdir(program.parent):
        session.run("mypy", "--ignore-missing-imports", "--config-file=", program.name)
        session.run(
            "pyright", "--pythonpath", shutil.which("python", path=session.bin), program.name
        )


def given_home(session):
    """What ``-- --home URL`` gives, or the package's metadata: see ``docs/for_index.py``."""
    given = dict(zip(session.posargs[::2], session.posargs[1::2])).get("--home")
    if given:
        os.environ["XMAP_COMPAT_HOME"] = given
    return home()


@nox.session
def docs(session):
    """The documentation in site/, with warnings as errors (a minute); the code of its pages runs among the tests.

    ``-- --home URL`` is where links to other files of the repository lead.
    """
    session.install("-e", ".[docs]", *PINNED)
    given_home(session)
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    if shutil.which("node"):
        session.run("node", "docs/search_check.js", "site", external=True)
    else:
        session.log("no node found: whether search finds the messages is not checked")


# A few tests that need pytest alone, with helpers, and documents; what else the archive holds is compared with git.
FROM_THE_ARCHIVE = [
    "tests/core/test_walking_skeleton.py",
    "tests/tutorial/test_tutorial_network.py",
    "tests/test_sampling.py",
    "tests/test_docs.py::test_links_between_files_lead_somewhere",
    "tests/test_docs.py::test_every_page_has_its_place_on_the_site",
]


@nox.session
def release(session):
    """What would be uploaded (three minutes): the source archive passes tests of its own, the wheel runs alone.

    ``-- --home URL`` is where links of README lead on a package index: see ``docs/for_index.py``.
    """
    made = Path(session.create_tmp()).resolve() / "release"
    shutil.rmtree(made, ignore_errors=True)
    session.install("build")
    checkout = made / "checkout"
    for name in session.run("git", "ls-files", external=True, silent=True).splitlines():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, checkout / name)
    public, readme, settings = given_home(session), checkout / "README.md", checkout / "setup.cfg"
    readme.write_text(for_index(readme.read_text(), public))
    without = settings.read_text()
    if public and f"Repository = {public}" not in without:
        stated = f"project_urls =\n    Repository = {public}\n"
        settings.write_text(without.replace("project_urls =\n", stated))
    session.run("python", "-m", "build", "--outdir", str(made), str(checkout))
    (archive,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    with tarfile.open(archive) as file:
        file.extractall(made, filter="data")
    tree = made / archive.name.removesuffix(".tar.gz")
    tracked = session.run("git", "ls-files", external=True, silent=True).splitlines()
    if missing := [name for name in tracked if not (tree / name).exists()]:
        session.error(f"not in the archive: {', '.join(missing)}")
    session.install(str(tree), "pytest", *PINNED)
    with session.chdir(tree):
        session.run("python", "-m", "pytest", "-q", *FROM_THE_ARCHIVE)
    # The wheel, and nothing else, in an environment of its own.
    session.run("python", "-m", "venv", "--clear", str(made / "bare"))
    python = str(made / "bare" / "bin" / "python")
    session.run(python, "-m", "pip", "install", "-q", str(wheel), *PINNED, external=True)
    example = re.search(
        "^```python\n(.*?)^```", (tree / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )[1]
    (made / "example.py").write_text(example)
    with session.chdir(made):
        session.run(python, "-W", "error", "example.py", external=True)
    session.log(f"made {archive} and {wheel}")
