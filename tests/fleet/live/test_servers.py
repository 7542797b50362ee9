"""One real server that is given weights by hand, a message at a time.

| row of the elastic fleet, or defect | test |
|---|---|
| soft pause; 11: pause of the local executor only | test_tokens_of_all_clients_name_the_weights_that_sampled_them |
| torn reads | test_while_buckets_come_every_token_is_of_the_old_version |
| messages are idempotent | test_whatever_is_said_twice_changes_nothing |
| zombie with an old generation gets 409; two controllers | test_who_is_of_an_older_epoch_is_refused |
| two controllers | test_a_newer_authority_takes_over_what_an_older_one_has_begun |
| wrong checksum | test_a_version_with_another_digest_is_thrown_away, test_a_bucket_with_other_bytes_is_refused |
| wrong-shape joiner, incompatible manifest, experts | test_tensors_of_another_model_are_refused_with_a_sentence |
| commit acknowledgement lost | test_a_lost_reply_to_commit_is_cleared_up_by_asking |
| pause lost, resume lost, double pause | test_a_pause_ends_with_its_lease |
| pause modes | test_paused_requests_go_on_or_end_as_they_were_told |
| 14: fast restart on the same address | test_a_process_that_was_started_anew_is_another_incarnation |
| keys | test_a_key_is_asked_for_and_shown_nowhere |
| deltas where bytes did not change | test_a_delta_leaves_out_what_did_not_change |
| a sender that falls silent | test_an_update_whose_sender_falls_silent_is_over |
| leaks (7: old groups never destroyed) | test_thirty_updates_leave_nothing_behind |
| exit at a fault point | test_a_server_that_dies_in_an_update_begins_with_its_folders_weights |
"""

import itertools
import re
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import pytest
import xxhash

from ductile.weights.digest import whole_digest
from tests.fleet.live.clients import PROMPT, Client, Told, ask
from tests.fleet.live.hand import HandUpdate, progress
from tests.fleet.live.reference import Versions
from tests.fleet.live.servers import LiveServer, Servers, wait_for
from tests.fleet.live.watcher import Watcher

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(60)]

POINTS = ("prepare", "bucket-first", "bucket-mid", "bucket-last", "verify", "commit", "commit-reply", "resume")


@pytest.fixture
def server(servers: Servers, truth: Versions) -> Iterator[LiveServer]:
    """A process of its own for each test; what must hold of any server holds when the test is over."""
    server = servers.all.get("a") or servers.start("a")[0]
    server.restart()
    watcher = Watcher()
    watcher.urls["a"] = server.url
    watcher.start()
    yield server
    watcher.stop()
    server.clear()
    if server.runs:
        wait_for(lambda: server.state().num_running + server.state().num_waiting == 0, 10, "all requests have ended")
        version = server.state().version
        assert server.live == (version, truth.digests[version])
    assert watcher.violations(truth.digests) == []


def check(truth: Versions, told: Told) -> None:
    assert not told.failure
    assert len(told.token_ids) == len(told.versions) == len(told.logprobs) == len(told.digests) > 0
    assert truth.why_not(told.prompt, told.token_ids, told.logprobs, told.versions) == ""
    assert [truth.digests[version] for version in told.versions] == told.digests


def test_tokens_of_all_clients_name_the_weights_that_sampled_them(
    server: LiveServer, truth: Versions, model: Path, tmp_path: Path
) -> None:
    clients = [Client(server.url, "/v1/completions", 100), Client(server.url, "/v1/chat/completions", 100)]
    for version in range(1, 21):
        if version not in truth:
            truth.make(version, model, tmp_path / str(version))
        seen = [client.num_tokens for client in clients]
        update = HandUpdate.of(server, truth.tensors[version], version, version)
        update.prepare()
        update.send_all()
        update.verify()
        if version % 2:
            update.pause(lease_s=5.0)
        assert progress(update.commit()).phase == "committed"
        update.resume()
        for client, before in zip(clients, seen, strict=True):
            wait_for(lambda client=client, before=before: client.num_tokens > before, 10, "the client gets tokens")
    told = [told for client in clients for told in client.stop()]
    for each in told:
        check(truth, each)
    assert len({version for each in told for version in each.versions}) > 10
    assert any(len(set(each.versions)) > 1 for each in told), "no request saw a version change"


@pytest.mark.parametrize("point", ["bucket-first", "bucket-mid", "bucket-last"])
def test_while_buckets_come_every_token_is_of_the_old_version(server: LiveServer, truth: Versions, point: str) -> None:
    server.fault(point, "hold")
    update = HandUpdate.of(server, truth.tensors[1], 1, 1, bucket_timeout_s=5.0)
    update.prepare()
    for index in range(len(update.contents)):
        sending = HandUpdate.in_background(update.send, index)
        sending.join(0.3)
        if sending.is_alive():
            break
    assert sending.is_alive(), "no bucket is held"
    told = ask(server.url, max_tokens=40)
    check(truth, told)
    assert {*told.versions} == {0}
    server.clear(point)
    sending.join(5)
    assert progress(update.abort()).phase == "aborted"
    assert server.live == (0, truth.digests[0])
    check(truth, ask(server.url))


def test_whatever_is_said_twice_changes_nothing(server: LiveServer, truth: Versions) -> None:
    update = HandUpdate.of(server, truth.tensors[2], 2, 3)
    assert progress(update.prepare()) == progress(update.prepare())
    for index in range(len(update.contents)):
        update.send(index)
        assert progress(update.send(index)).num_buckets == index + 1
    assert progress(update.verify()) == progress(update.verify())
    assert progress(update.commit()).phase == "committed"
    assert progress(update.commit()).phase == "committed"
    assert progress(update.prepare()).phase == "committed", "an update that is over does not begin again"
    assert update.abort().status_code == 200
    assert server.state().version == 2
    update.resume()
    update.resume()
    check(truth, ask(server.url))


def test_who_is_of_an_older_epoch_is_refused(server: LiveServer, truth: Versions) -> None:
    """As a rank that was stopped while the others went on, or a second controller."""
    zombie = HandUpdate.of(server, truth.tensors[1], 1, 4)
    assert zombie.prepare().status_code == 200
    assert zombie.send(0).status_code == 200
    HandUpdate.of(server, truth.tensors[2], 2, 5).whole()
    for call in (lambda: zombie.send(1), zombie.verify, zombie.commit, zombie.pause):
        assert call().status_code == 409
    late = HandUpdate.of(server, truth.tensors[3], 3, 4)
    assert late.prepare().status_code == 409
    assert server.state().epoch == 5
    assert server.state().version == 2
    assert not server.state().paused


def test_a_newer_authority_takes_over_what_an_older_one_has_begun(server: LiveServer, truth: Versions) -> None:
    old, new = (HandUpdate.of(server, truth.tensors[version], version, version) for version in (1, 2))
    old.prepare()
    old.send_all()
    assert progress(old.verify()).phase == "verified"
    same = HandUpdate.of(server, truth.tensors[2], 2, 1)
    assert same.prepare().status_code == 409, "another update at the same epoch is under way"
    new.whole()
    assert old.commit().status_code == 409
    assert server.state().version == 2


def test_a_version_with_another_digest_is_thrown_away(server: LiveServer, truth: Versions) -> None:
    update = HandUpdate.of(server, truth.tensors[1], 1, 1)
    update.prepare()
    wrong = bytearray(update.contents[-1])
    wrong[-1] ^= 64
    for index, content in enumerate([*update.contents[:-1], bytes(wrong)]):
        assert update.send(index, content).status_code == 200
    failed = progress(update.verify())
    assert failed.phase == "failed"
    assert truth.digests[1] in failed.reason
    assert progress(update.commit()).phase == "failed"
    assert server.live == (0, truth.digests[0])
    HandUpdate.of(server, truth.tensors[1], 1, 2).whole()


def test_a_bucket_with_other_bytes_is_refused(server: LiveServer, truth: Versions) -> None:
    update = HandUpdate.of(server, truth.tensors[1], 1, 1, verify="crc")
    update.prepare()
    sums = [xxhash.xxh3_64_hexdigest(content) for content in update.contents]
    wrong = update.contents[0][:-1] + bytes([update.contents[0][-1] ^ 1])
    assert update.send(0, wrong, sums[0]).status_code == 422
    assert update.send(0, update.contents[0][:-4]).status_code == 422, "it is too short"
    for index, checksum in enumerate(sums):
        assert update.send(index, checksum=checksum).status_code == 200
    update.verify()
    assert progress(update.commit()).phase == "committed"


def test_tensors_of_another_model_are_refused_with_a_sentence(server: LiveServer, truth: Versions) -> None:
    ours = dict(truth.tensors[1])
    name = "layers.0.mlp.down_proj.weight"
    others = {
        "another shape": ours | {name: ours[name][:, :-1].contiguous()},
        "one is missing": {each: tensor for each, tensor in ours.items() if each != name},
        "experts": ours | {"layers.0.mlp.experts.down_proj.weight": ours[name].expand(4, -1, -1).contiguous()},
        "a dtype that holds more": ours | {name: ours[name].double()},
    }
    for epoch, (what, tensors) in enumerate(others.items(), 1):
        update = HandUpdate.of(server, tensors, 1, epoch)
        refused = update.prepare()
        assert refused.status_code == 422, what
        assert "down_proj" in refused.json()["error"]["message"]
        assert update.send(0).status_code == 409
    assert server.live == (0, truth.digests[0])
    HandUpdate.of(server, ours, 1, 10).whole()


def test_a_lost_reply_to_commit_is_cleared_up_by_asking(server: LiveServer, truth: Versions) -> None:
    update = HandUpdate.of(server, truth.tensors[1], 1, 1)
    update.prepare()
    update.send_all()
    update.verify()
    server.fault("commit-reply", "drop")
    with pytest.raises(httpx.ReadTimeout):
        update.commit(timeout_s=0.3)
    state = server.state()
    assert (state.version, state.digest) == (1, truth.digests[1])
    server.clear()
    assert progress(update.commit()).phase == "committed"
    check(truth, ask(server.url))


def test_a_pause_ends_with_its_lease(server: LiveServer, truth: Versions) -> None:
    update = HandUpdate.of(server, truth.tensors[1], 1, 1)
    clients = [Client(server.url, "/v1/completions", 30), Client(server.url, "/v1/chat/completions", 30)]
    wait_for(lambda: all(client.num_tokens for client in clients), 10, "both clients get tokens")
    update.pause(lease_s=30.0)
    assert update.pause(lease_s=0.6).status_code == 200, "twice, as its reply may be lost: the lease begins anew"
    assert server.state().paused
    sampled = server.state().num_sampled
    time.sleep(0.3)
    assert server.state().num_sampled == sampled, "no client gets a token"
    wait_for(lambda: not server.state().paused, 5, "the lease is over")
    for told in [told for client in clients for told in client.stop()]:
        check(truth, told)
    assert update.resume().status_code == 200
    assert update.pause(lease_s=0.0).status_code == 400, "a pause without a lease is none"


@pytest.mark.parametrize("mode", ["abort", "keep", "drain"])
def test_paused_requests_go_on_or_end_as_they_were_told(server: LiveServer, truth: Versions, mode: str) -> None:
    told = Told(PROMPT)
    asking = HandUpdate.in_background(lambda: ask(server.url, max_tokens=300, told=told))
    wait_for(lambda: len(told.token_ids) > 3, 10, "it gets tokens")
    update = HandUpdate.of(server, truth.tensors[1], 1, 1)
    update.pause(mode=mode, lease_s=10.0)
    state = server.state()
    assert state.paused
    assert state.num_running + state.num_waiting == (1 if mode == "keep" else 0)
    update.whole()
    update.resume()
    asking.join(20)
    check(truth, told)
    assert told.finish_reason == ("abort" if mode == "abort" else "length")
    assert {*told.versions} == ({0, 1} if mode == "keep" else {0})


def test_a_process_that_was_started_anew_is_another_incarnation(server: LiveServer, truth: Versions) -> None:
    HandUpdate.of(server, truth.tensors[1], 1, 7).whole()
    before = server.state()
    update = HandUpdate.of(server, truth.tensors[2], 2, 8)
    update.prepare()
    server.restart()
    after = server.state()
    assert after.incarnation != before.incarnation
    assert (after.version, after.digest, after.epoch, after.update) == (0, truth.digests[0], 0, None)
    assert update.send(0).status_code == 401, "nor does it know its predecessor's token"
    update.token = server.control_token
    assert update.send(0).status_code == 409
    assert update.commit().status_code == 409


def test_a_key_is_asked_for_and_shown_nowhere(servers: Servers, truth: Versions) -> None:
    key = "sk-this-is-a-secret"
    (server,) = servers.start("keyed", server={"api_key": key})
    try:
        assert httpx.get(f"{server.url}/fleet/state").status_code == 401
        assert ask(server.url, api_key=key).finish_reason == "length"
        update = HandUpdate.of(server, truth.tensors[1], 1, 1)
        update.token = "sk-this-is-wrong"
        for call in (update.prepare, lambda: update.send(0), update.verify, update.commit, update.abort, update.pause):
            refused = call()
            assert refused.status_code == 401
            assert key not in refused.text
            assert update.token not in refused.text
        update.token = key
        update.whole()
        shown = server.log.read_text() + server.get("/fleet/state").text + server.get("/metrics").text
        shown += Path(f"/proc/{server.pid}/cmdline").read_text()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        shown += server.process.stdout.read()
        assert key not in shown
        assert "sk-this-is-wrong" not in shown
    finally:
        servers.remove(server)


def test_a_control_token_is_its_users_and_goes_with_the_server(server: LiveServer) -> None:
    token = server.control_token
    file = server.folder.parent / "ductile" / "servers" / f"127.0.0.1-{server.port}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in server.log.read_text()
    assert httpx.post(f"{server.url}/pause", content=b'{"epoch":1}').status_code == 401
    assert server.state().epoch == 0, "probing needs no token"
    server.restart()
    assert server.control_token != token
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(20)
    assert not file.exists()


def test_a_delta_leaves_out_what_did_not_change(server: LiveServer, truth: Versions) -> None:
    changed = [name for name in truth.tensors[0] if name.endswith("o_proj.weight")]
    tensors = dict(truth.tensors[0]) | {name: truth.tensors[1][name] for name in changed}
    delta = HandUpdate.of(server, {name: tensors[name] for name in changed}, 60, 1, base_version=0)
    delta.digest = truth.digests[60] = whole_digest(tensors.items())
    delta.whole()
    assert server.live == (60, delta.digest)
    wrong = HandUpdate.of(server, {changed[0]: truth.tensors[2][changed[0]]}, 61, 2, base_version=0)
    refused = wrong.prepare()
    assert refused.status_code == 422
    assert "live" in refused.json()["error"]["message"]


def test_an_update_whose_sender_falls_silent_is_over(server: LiveServer, truth: Versions) -> None:
    update = HandUpdate.of(server, truth.tensors[1], 1, 1, bucket_timeout_s=0.3)
    update.prepare()
    update.send(0)
    failed = progress(update.verify())
    assert failed.phase == "failed"
    assert "0.3 s" in failed.reason
    assert update.send(1).status_code == 409
    quiet = HandUpdate.of(server, truth.tensors[1], 1, 2, total_timeout_s=0.5)
    quiet.prepare()
    wait_for(lambda: server.state().update.phase == "failed", 5, "an update that nobody ends is over")
    check(truth, ask(server.url))


def test_thirty_updates_leave_nothing_behind(server: LiveServer, truth: Versions) -> None:
    shared = sorted(each.name for each in Path("/dev/shm").iterdir())
    sizes = []
    epochs = itertools.count(1)
    for number in range(30):
        version = 101 + number
        truth.digests[version] = truth.digests[1]
        if number % 3 == 0:
            broken = HandUpdate.of(server, truth.tensors[2], version, next(epochs))
            broken.prepare()
            broken.send(0)
            broken.abort()
        HandUpdate.of(server, truth.tensors[1], version, next(epochs)).whole()
        if number in (9, 29):
            files = [file for file in server.open_files if not file.startswith("socket")]
            sizes.append((server.num_threads, len(files), server.private_bytes))
    (threads, files, size), (threads_later, files_later, size_later) = sizes
    assert (threads_later, files_later) == (threads, files)
    assert size_later < size + 4 * 75_264, "the bytes of four versions"
    assert sorted(each.name for each in Path("/dev/shm").iterdir()) == shared


@pytest.mark.parametrize("point", POINTS)
def test_a_server_that_dies_in_an_update_begins_with_its_folders_weights(
    server: LiveServer, truth: Versions, point: str
) -> None:
    server.fault(point, "exit")
    update = HandUpdate.of(server, truth.tensors[1], 1, 1)
    with suppress(httpx.TransportError):
        update.whole()
        update.resume()
    assert server.process.wait(5) != 0
    server.restart()
    assert server.state().version == 0
    told = ask(server.url)
    check(truth, told)
    assert {*told.versions} == {0}
    HandUpdate.of(server, truth.tensors[1], 1, 1).whole()


def test_no_digest_of_a_server_is_a_guess(server: LiveServer, truth: Versions) -> None:
    """13 hexadecimal digits, the trainer's, and read anew from what is sampled from."""
    HandUpdate.of(server, truth.tensors[1], 1, 1).whole()
    state = server.state()
    assert re.fullmatch(r"[0-9a-f]{13}", state.digest)
    assert state.digest == truth.digests[1] == server.live[1]
    assert state.digest != truth.digests[2]
    assert msgspec.json.encode(state).count(b"token") == 0
