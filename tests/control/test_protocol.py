from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control import protocol
from shoal.control.generation import Generation, Member

HERE = Path(protocol.__file__).parent


def test_the_committed_description_is_that_of_the_proto_file(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    made = tmp_path / "protocol.desc"
    arguments = ["protoc", f"-I{HERE}", f"--descriptor_set_out={made}", "--include_imports", f"{HERE}/protocol.proto"]
    assert protoc.main(arguments) == 0
    assert made.read_bytes() == (HERE / "protocol.desc").read_bytes(), "make protocol.desc again, see protocol.py"


def test_a_generation_survives_the_wire() -> None:
    generation = Generation(7, (Member("w1", 3, "a"), Member("w0", 0, "b")), (Member("w2", 255, "a"),), True, True)
    told = protocol.ToWorker(generation=protocol.to_wire(generation))
    message = protocol.ToWorker.FromString(told.SerializeToString())
    kind, body = protocol.kind_of(message)
    assert kind == "generation"
    assert protocol.from_wire(body) == generation


def test_a_message_of_a_kind_we_do_not_know_is_no_kind() -> None:
    assert protocol.kind_of(protocol.FromWorker()) == ("", None)


@pytest.mark.parametrize(
    "metadata", [(), (("authorization", "Bearer "),), (("authorization", "secret"),), (("authorization", b"\xff"),)]
)
def test_only_the_exact_token_is_admitted(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    assert protocol.admits("secret", protocol.credentials("secret"))
    assert not protocol.admits("secret", metadata)
