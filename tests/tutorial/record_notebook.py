"""Record what jax 0.4.30 shows for a notebook, in place: ``python record_notebook.py NOTEBOOK...``, with that jax.

It needs nbclient and ipykernel.  Warnings of that jax are not stored.
"""

import os
import re
import sys
import warnings

warnings.simplefilter("ignore")

import jax
import nbclient
import nbformat

if __name__ == "__main__":
    assert jax.__version__ == "0.4.30", jax.__version__
    os.environ["PYTHONWARNINGS"] = "ignore"
    for path in sys.argv[1:]:
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(
            notebook, kernel_name="python3", allow_errors=True, timeout=None
        ).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
                for output in cell.outputs:
                    if output.output_type == "error":
                        output.traceback = []  # it holds paths
                        output.evalue = re.sub(r"\n.*", "", output.evalue, flags=re.DOTALL)
        notebook.metadata.pop("widgets", None)
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, path)
