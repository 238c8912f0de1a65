"""A Slurm cluster of this machine: the processes of a job step find their shards, and a batch script none."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..faults import await_true
from ..limits import WAIT_S
from ..scripts import WITH_THE_PROJECT

pytestmark = pytest.mark.exhaustive  # data/test_sharded_sampler.py has the variables of Slurm

SCRIPT = """
    import json, sys
    from torchvision import transforms
    from proxyloader import DataLoader, World
    from tests.integration.one_rank import Numbered

    transform = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
    loader = DataLoader(Numbered(sys.argv[1], transform), 8, shuffle=True, num_shards="auto", device="cpu")
    numbers = [number for _, numbers in loader for number in numbers.tolist()]
    print(json.dumps([World.current().num_shards, numbers]), flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands find it."""
    if shutil.which("slurmctld") is None or subprocess.run(["munge", "-n"], capture_output=True).returncode:
        pytest.skip("Slurm is not installed, or munged does not run; tests/README.md says how to get both")
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().split(".")[0]
    ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    (folder / "slurm.conf").write_text(
        textwrap.dedent(f"""
        ClusterName=local
        SlurmctldHost={host}(127.0.0.1)
        SlurmctldPort={ports[0].getsockname()[1]}
        SlurmdPort={ports[1].getsockname()[1]}
        SlurmUser=root
        StateSaveLocation={folder}
        SlurmdSpoolDir={folder}
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/slurmd.pid
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        SlurmdParameters=config_overrides
        NodeName={host} NodeAddr=127.0.0.1 CPUs=4
        PartitionName=all Nodes={host} Default=YES State=UP
        """)
    )
    for port in ports:
        port.close()
    environment = {**WITH_THE_PROJECT, "SLURM_CONF": str(folder / "slurm.conf"), "CUDA_VISIBLE_DEVICES": ""}
    daemons = [
        subprocess.Popen([name, "-D"], env=environment, stderr=subprocess.DEVNULL, cwd=folder)
        for name in ("slurmctld", "slurmd")
    ]
    try:
        await_true(lambda: "idle" in subprocess.run("sinfo", env=environment, capture_output=True, text=True).stdout)
        yield environment
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(WAIT_S)


def test_the_processes_of_a_job_step_share_the_dataset_and_a_batch_script_loads_it_all(
    cluster: dict[str, str], photos: Path, tmp_path: Path
) -> None:
    script, job, out = tmp_path / "load.py", tmp_path / "job.sh", tmp_path / "out"
    script.write_text(textwrap.dedent(SCRIPT))
    load = f"{sys.executable} {script} {photos}"
    job.write_text(f"#!/bin/sh\n{load}\nsrun --overlap {load}\nsrun --overlap -n 1 {load}\n")
    command = ["sbatch", "--wait", "-n", "2", "-o", str(out), str(job)]
    done = subprocess.run(command, env=cluster, cwd=os.getcwd(), timeout=2 * WAIT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + out.read_text()
    whole, *shares, alone = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each[0] for each in (whole, *shares, alone)] == [1, 2, 2, 1]
    for each in (whole[1], shares[0][1] + shares[1][1], alone[1]):
        assert sorted(each) == list(range(48))
