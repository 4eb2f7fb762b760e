"""A program that runs another one where xmap_compat cannot be imported, even if it has been.

python without_package.py SCRIPT [ARGS...]
"""

import os
import runpy
import sys

if __name__ == "__main__":
    ours = [name for name in sys.modules if name.partition(".")[0] == "xmap_compat"]
    sys.modules.update(dict.fromkeys(["xmap_compat", *ours]))
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
