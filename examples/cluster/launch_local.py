"""Start a program as several processes of one job on this machine, with the variables that Slurm would set.

python examples/cluster/launch_local.py COUNT PROGRAM [ARGUMENT...]
"""

import os
import socket
import subprocess
import sys
import time

SECONDS_TO_END = 20  # for the others, when one has failed: they have something to say, too


def launch(count, command):
    """Run the processes; the largest exit code.  None of them is left behind."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    job = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(count)}
    # Slurm's job number, from which the port is made, would be the same for every job here.
    job |= {"JAX_COORDINATOR_PORT": str(port)}
    processes = []
    try:
        for k in range(count):
            own = {"SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)}
            processes.append(
                subprocess.Popen([sys.executable, *command], env={**os.environ, **job, **own})
            )
        while None in (codes := [p.poll() for p in processes]) and not any(codes):
            time.sleep(0.1)
        deadline = time.monotonic() + SECONDS_TO_END
        while None in [p.poll() for p in processes] and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return max(abs(p.returncode) for p in processes)


if __name__ == "__main__":
    sys.exit(launch(int(sys.argv[1]), sys.argv[2:]))
