"""Record which names of the table of removed ones jax 0.4.30 has: ``python record_names.py``, with that jax.

Writes ``names_0_4_30.json``.  The table is read without the package, which needs a newer JAX.
"""

import importlib
import importlib.util
import json
import pathlib
import sys
import warnings

import jax

HERE = pathlib.Path(__file__).parent


def load_table():
    path = HERE.parent.parent / "xmap_compat" / "legacy" / "removed.py"
    spec = importlib.util.spec_from_file_location("removed", path)
    module = sys.modules["removed"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has(name):
    module, _, attribute = name.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for statement in (f"from {module} import {attribute}", f"import {module}; {name}", f"import jax; {name}"):
            try:
                exec(statement, {})
            except (ImportError, AttributeError):
                continue
            return True
    return False


if __name__ == "__main__":
    assert jax.__version__ == "0.4.30", jax.__version__
    found = {row.name: has(row.name) for row in load_table().TABLE}
    (HERE / "names_0_4_30.json").write_text(json.dumps(found, indent=1) + "\n")
