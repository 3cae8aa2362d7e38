"""A node of a real federation that takes part and, before each of its replies, sends messages that are no
replies, and in others' names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from holdfast.deploy.enrolment import Enrolment  # noqa: E402
from holdfast.deploy.up import RunningFederation  # noqa: E402
from tests.deploy.hostile_node import corrupt  # noqa: E402
from tests.deploy.real_federation import PATIENT, found, model_of, simulated  # noqa: E402

pytestmark = pytest.mark.slow

FORGER = """
import hashlib, json
from flwr.supernode.fleet_http_client import FleetHttpClient
announce = FleetHttpClient.PushMessages
def forge(self, request):
    own = request.node.node_id
    numbers = [int(node) for node in json.loads((server / 'registered.json').read_text()).values() if node]
    letter = request.messages_list[0].metadata.reply_to_message_id
    for other in [number for number in numbers if number != own]:
        for source, target, answered in ((1, other, ''), (own, other, ''), (other, 1, ''), (other, 1, letter)):
            forged = type(request)()
            forged.CopyFrom(request)
            about, tree = forged.messages_list[0].metadata, forged.message_object_trees[0]
            about.src_node_id, about.dst_node_id, about.reply_to_message_id = source, target, answered
            about.message_id = tree.object_id = hashlib.sha256(os.urandom(8)).hexdigest()
            del tree.children[:]
            try:
                announce(self, forged)
                said = 'taken'
            except Exception as error:
                said = str(error)
            with open(here / 'forged', 'a') as file:
                file.write(said + '\\\\n')
    return announce(self, request)
FleetHttpClient.PushMessages = forge
""".replace("\\\\n", "\\n")  # noqa: E501


def test_forged_messages_reach_nobody_and_are_held_against_their_sender(tmp_path: Path) -> None:
    """`strikes` 0: the forger is never banned, so that its own replies count and the run is the simulator's,
    bit by bit."""
    project = found(tmp_path, clients=3, rounds=2, strikes=0, quorum=1.0, wait=PATIENT)
    up = RunningFederation(project, lambda line: None)
    up.processes.extra["node1"] = corrupt(project, 1, FORGER)
    with up:
        up.run(timeout=PATIENT)
    assert not up.processes.alive()
    answers = (project.path / "cheat1" / "forged").read_text().splitlines()
    assert len(answers) >= 16 and all("403" in line for line in answers)
    ledger = project.ledger()
    struck = {
        (entry.client, entry.round, entry.what["offence"], entry.what["by"]) for entry in ledger.of("strike")
    }
    assert {(1, 1, "name", "proxy"), (1, 1, "order", "proxy")} <= struck and {
        client for client, *_ in struck
    } == {1}
    assert len(struck) == len(ledger.of("strike"))  # each once
    assert Enrolment.of(ledger.entries).banned == {} and ledger.of("missing") == []
    assert [entry.what["took_part"] for entry in ledger.of("round")] == [[0, 1, 2], [0, 1, 2]]
    assert torch.equal(model_of(project.run), model_of(simulated(project, tmp_path / "sim")))
