"""What `triptych doctor` says of TLS files and of device memory between processes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.unit.fake_machine import machine_at
from triptych.cli.checks import device, network
from triptych.cli.checks.finding import Status, guarded
from triptych.cli.checks.machine import Gpu, TorchFacts
from triptych.core.errors import StartupError
from triptych.testing.fake_device import FakeDevice
from triptych.transport import cuda_driver, curve
from triptych.transport.device import DeviceError

# --- TLS --------------------------------------------------------------------------------------------------------------


def test_files_that_serve_are_fine_and_their_end_is_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path, days=100)
    fine = network.tls(authority.issue(days=60))
    assert fine.status is Status.OK and "good for 60 more days" in fine.found
    soon = network.tls(authority.issue("soon", days=3))
    assert soon.status is Status.WARN and "3 more days" in soon.found and "restart" in str(soon.todo)
    assert network.tls(None).status is Status.OK


@pytest.mark.parametrize("what", ["expired", "mismatched", "unreadable", "open", "unnamed", "another authority"])
def test_files_that_stop_a_worker_fail_with_its_sentence(what: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue()
    if what == "open":
        files.key.chmod(0o644)
    spoiled, sentence = {
        "expired": lambda: (authority.issue("old", days=-1), "has expired"),
        "mismatched": lambda: (replace(files, key=authority.issue("other").key), "is not that of the certificate"),
        "unreadable": lambda: (replace(files, cert=tmp_path), "cannot be read: Is a directory"),
        "open": lambda: (files, "run: chmod 0600"),
        "unnamed": lambda: (authority.issue("n", names="DNS:x.example.org"), "subjectAltName=DNS:triptych.internal"),
        "another authority": lambda: (replace(files, ca=Authority(tmp_path, "b").path), "not signed by the authority"),
    }[what]()
    finding = guarded("tls", lambda: network.tls(spoiled))
    assert finding.status is Status.FAIL and sentence in finding.found and finding.todo


def test_a_zeromq_that_cannot_encrypt_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve.zmq, "has", lambda _: False)
    files = Authority(tmp_path).issue()
    with pytest.raises(StartupError, match="pip install --force-reinstall pyzmq"):
        network.tls(files)


# --- device memory ----------------------------------------------------------------------------------------------------

FAKE_PEER = """
import sys
from pathlib import Path
from triptych.cli.checks import device_peer
from triptych.testing.fake_device import FakeDevice
from triptych.transport.device import DeviceError
driver = FakeDevice(Path(sys.argv[1]), opens=sys.argv[2] == "opens")
try:
    device_peer.main(driver, bytes.fromhex(sys.argv[3]), int(sys.argv[4]))
except DeviceError as error:
    sys.exit(str(error))
assert not driver.violations and driver.num_open == 0
"""


@pytest.mark.parametrize("does", ["opens", "refuses", "dies"])
def test_two_processes_try_it_and_leave_nothing(does: str, tmp_path: Path) -> None:
    driver = FakeDevice(tmp_path)
    peer = ("/bin/false",) if does == "dies" else (sys.executable, "-c", FAKE_PEER, str(tmp_path), does)
    found = device.fault_of(driver, peer)
    assert found == {"opens": None, "refuses": "this handle cannot be opened here"}.get(
        does, "the other process ended with 1"
    )
    assert driver.num_allocations == 0 and driver.violations == [] and list(tmp_path.iterdir()) == []
    driver.close()


def test_what_does_not_arrive_is_a_fault(tmp_path: Path) -> None:
    driver = FakeDevice(tmp_path)
    assert device.fault_of(driver, ("/bin/true",)) == "what another process wrote did not arrive"
    driver.close()


def test_it_fails_only_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = machine_at(tmp_path)
    assert device.cuda_ipc(without, "auto").status is Status.OK
    assert device.cuda_ipc(without, "cuda_ipc").status is Status.FAIL
    gpu = replace(without, torch=TorchFacts("2.13.0", "12.9", (Gpu("H200", 1, 1, (9, 0)),)))

    def broken(_: object) -> None:
        raise DeviceError("cuInit: CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(cuda_driver, "CudaDriver", broken)
    for transport, status in (("auto", Status.WARN), ("cuda_ipc", Status.FAIL)):
        finding = device.cuda_ipc(gpu, transport)
        assert finding.status is status and "CUDA_ERROR_UNKNOWN" in finding.found
    monkeypatch.setattr(cuda_driver, "CudaDriver", lambda _: None)
    monkeypatch.setattr(device, "fault_of", lambda *_: None)
    assert device.cuda_ipc(gpu, "cuda_ipc").status is Status.OK
