"""Keys that nodes make themselves, and what an operator has to state before anybody joins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower deployment needs flwr: pip install 'holdfast[flower]'")

from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # noqa: E402

from holdfast.deploy.enrolment import Enrolment  # noqa: E402
from holdfast.deploy.processes import free_port  # noqa: E402
from holdfast.deploy.project import open_project  # noqa: E402


def test_a_key_that_is_made_on_the_node(
    ask: Callable[..., tuple[int, str, str]], tmp_path: Path, roomy: None
) -> None:
    """No private key is ever on the server: the node makes it, the server enrols the public half, and the
    folder goes to the node."""
    ward, home = tmp_path / "ward", tmp_path / "node"
    assert ask("init", ward, "--clients", 2, "--port", free_port(), "--no-node-keys")[0] == 0
    assert (
        list(ward.glob("nodes/*")) == []
        and Enrolment.of(open_project(ward).ledger().entries).admitted == set()
    )
    code, out, _ = ask("doctor", ward)
    assert code == 1 and "0 are enrolled: `holdfast federation enrol" in out
    for client in range(2):
        code, out, err = ask("key", home / str(client), "--client", client)
        assert (
            code == 0
            and out.split() == (home / str(client) / "key.pub").read_text().split()
            and "stays here" in err
        )
        assert (home / str(client) / "key").stat().st_mode & 0o777 == 0o600 and (
            home / str(client)
        ).stat().st_mode & 0o777 == 0o700
        code, out, _ = ask("enrol", ward, client, "--key", home / str(client) / "key.pub")
        assert code == 0 and "with its own key" in out
        files = {file.name for file in (ward / "nodes" / str(client)).iterdir()}
        assert files == {"key.pub", "ca.pem", "server.pub", "node.toml", "experiment.toml"}
        for file in (ward / "nodes" / str(client)).iterdir():
            (home / str(client) / file.name).write_bytes(file.read_bytes())
        assert ask("check-node", home / str(client))[0] == 0
    code, out, _ = ask("doctor", ward)
    assert code == 0 and "the private keys of 2 are on the nodes only" in out, out
    pem = tmp_path / "small.pub"
    small = (
        ec.generate_private_key(ec.SECP256R1())
        .public_key()
        .public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    )
    pem.write_bytes(small)
    entries = len(open_project(ward).ledger().entries)
    for args, said in {
        ("key", home / "0", "--client", 0): "a key is never overwritten",
        ("enrol", ward, 0, "--key", home / "0" / "key.pub"): "client 0 has this key already",
        ("enrol", ward, 0, "--key", home / "1" / "key.pub"): "belongs or belonged to client 1",
        ("enrol", ward, 0, "--key", home / "0" / "key"): "is a private key, which never leaves its node",
        ("enrol", ward, 0, "--key", pem): "a node needs a key of curve secp384r1",
        ("enrol", ward, 0, "--key", ward / "README.md"): "not a public key",
        ("enrol", ward, 0, "--key", tmp_path / "nothing.pub"): "cannot be read",
    }.items():
        code, _, err = ask(*args)
        assert code == 2 and said in err and len(err.splitlines()) == 1, (args, err)
    assert len(open_project(ward).ledger().entries) == entries and (ward / "nodes/0/key.pub").exists()
    (home / "0" / "key").unlink()
    (home / "0" / "key.pub").unlink()
    assert "there is no key; `holdfast federation key" in ask("check-node", home / "0")[1]
    ask("key", home / "0", "--client", 0)
    assert (
        ask("check-node", home / "0")[0] == 0
        and ask("enrol", ward, 0, "--key", home / "0" / "key.pub")[0] == 0
    )
    assert open_project(ward).ledger().entries[-1].kind == "rotate"
    (home / "0" / "key.pub").write_bytes((home / "1" / "key.pub").read_bytes())
    assert "key.pub is not the public half of key" in ask("check-node", home / "0")[1]


def test_the_most_samples_that_a_client_may_claim_must_be_stated(
    ask: Callable[..., tuple[int, str, str]], tmp_path: Path, roomy: None
) -> None:
    ward, file = tmp_path / "ward", tmp_path / "e.toml"
    text = '[data]\nname = "declared"\nclients = 2\noptions = {{ shape = [2], classes = 2{} }}\n'
    file.write_text(text.format(""))
    code, _, err = ask("init", ward, "--clients", 2, "--experiment", file)
    assert (
        code == 2
        and "data.options.most: set the largest number of samples that a client may have" in err
        and not ward.exists()
    )
    file.write_text(text.format(", most = 500"))
    assert (
        ask("init", ward, "--clients", 2, "--experiment", file, "--port", free_port())[0] == 0
        and ask("doctor", ward)[0] == 0
    )
    for copy in ward.rglob("experiment.toml"):
        copy.write_text(text.format(""))
    assert "BAD  config       data.options.most: set" in ask("doctor", ward)[1]
    code, _, err = ask("up", ward)
    assert code == 2 and "data.options.most: set" in err and len(err.splitlines()) == 1
