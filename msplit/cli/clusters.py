"""Options of what runs over a cluster of TensorFlow servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from msplit.cli.keys import Key

if TYPE_CHECKING:
    from msplit.engines.base import ClusterOptions

PLACE = "FILE|TF_CONFIG"
WHAT = "Processes by job and address, in YAML or JSON as TensorFlow's ClusterSpec has them; TF_CONFIG: as that variable says."
"""Of --cluster, wherever it is an option."""

CLUSTER = (
    Key("cluster", f"FILE or TF_CONFIG: run over several processes (`msplit worker`). {WHAT}"),
    Key("ps-strategy", "Which task of job ps keeps which variable.", click.Choice(["bytes", "round-robin"]), "bytes"),
)
CONTAINER = Key(
    "container", "A name under which the cluster keeps variables, for later clients or others beside this one."
)


def over(cluster: str | None, ps_strategy: str, container: str | None = None) -> ClusterOptions | None:
    """What these options ask for; None for one process.

    Raises:
        MsplitError: It is no cluster.
    """
    if cluster is None:
        if container is not None:
            raise click.UsageError("--tensorflow container= is for variables in other processes: give cluster=, too.")
        return None
    from msplit.engines.base import ClusterOptions
    from msplit.formats.cluster import read

    return ClusterOptions(read(cluster), ps_strategy=ps_strategy, container=container)
