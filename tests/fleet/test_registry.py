"""Registries that are half written, full of rubbish, deleted, restarted and fought over."""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import pytest

from ductile.config.schema.fleet import CustomRegistry, FileRegistry, FleetConfig, HttpRegistry, RegistryConfig
from ductile.config.server_address import is_root
from ductile.fleet.registry.authority import Authority, FolderAuthority, HttpAuthority, first_epoch
from ductile.fleet.registry.discovery import Discovery
from ductile.fleet.registry.registries import LeaseFolder, RegistryClient, RegistryDown, StaticServers, registry_of
from ductile.fleet.registry.registry_server import LeaseTable, registry_app, serve_registry
from ductile.generator.server.registrar import Registrar
from ductile.messages.control_token import token_of
from ductile.messages.server_lease import LeaseError, ServerLease, lease_file, lease_from

URL = "http://127.0.0.1:8001"


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lease(port: int = 8001, **fields: object) -> ServerLease:
    given = {"url": f"http://127.0.0.1:{port}", "incarnation": "x", "renewed_at": 1000.0, "beat": 1}
    return ServerLease(**{**given, **fields})


def write(folder: Path, one: ServerLease) -> Path:
    file = folder / lease_file(one.url)
    file.write_bytes(msgspec.json.encode(one))
    return file


def folder_of(tmp_path: Path, clock: Clock, told: list[str] | None = None) -> LeaseFolder:
    return LeaseFolder(tmp_path, 15.0, (told if told is not None else []).append, clock, clock)


def urls(registry: LeaseFolder | RegistryClient) -> set[str]:
    return {*asyncio.run(registry.servers())}


def test_a_lease_counts_as_long_as_it_is_renewed(tmp_path: Path) -> None:
    clock = Clock()
    registry = folder_of(tmp_path, clock)
    write(tmp_path, lease())
    assert urls(registry) == {URL}
    clock.now += 15
    assert urls(registry) == {URL}
    clock.now += 1  # it was killed
    assert urls(registry) == set()
    write(tmp_path, lease(incarnation="y"))  # and has been started again
    assert urls(registry) == {URL}


def test_neither_clock_need_be_right(tmp_path: Path) -> None:
    """An old date may be one of a server that died long ago, or of a clock that is behind: the next beat tells."""
    clock = Clock()
    registry = folder_of(tmp_path, clock)
    write(tmp_path, lease(renewed_at=-1e6))
    assert urls(registry) == set()
    clock.now += 5
    write(tmp_path, lease(renewed_at=-1e6 + 5, beat=2))
    assert urls(registry) == {URL}


RUBBISH = {
    "half.json": b'{"url": "http://127.0.0.1:80',
    "empty.json": b"",
    "text.json": b"hello",
    "list.json": b"[1, 2]",
    "other.json": b'{"kind": "pod"}',
    "typed.json": b'{"url": 7, "incarnation": "x"}',
    "where.json": b'{"url": "file:///etc/passwd", "incarnation": "x"}',
    "path.json": b'{"url": "http://127.0.0.1:8001/v1?x=1", "incarnation": "x"}',
    "user.json": b'{"url": "http://me:pw@127.0.0.1:8001", "incarnation": "x"}',
    "who.json": b'{"url": "http://127.0.0.1:8001", "incarnation": ""}',
    "long.json": b"[" * 100_000,
    "bytes.json": b"\xff\xfe\x00",
}


def test_rubbish_is_skipped_with_a_sentence_each_once(tmp_path: Path) -> None:
    told: list[str] = []
    registry = folder_of(tmp_path, Clock(), told)
    for name, content in RUBBISH.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    os.symlink(write(tmp_path, lease()), tmp_path / "link.json")
    (tmp_path / "notes.txt").write_text("no lease, and none of ours to speak of")
    (tmp_path / ".127.0.0.1-8002.json.partial").write_text("{")
    for _ in range(3):
        assert urls(registry) == {URL}
    names = {*RUBBISH, "folder.json", "pipe.json", "link.json"}
    assert {Path(each.partition(" is skipped: it ")[0]).name for each in told} == names
    assert len(told) == len(names)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_lease_of_another_user_is_skipped(tmp_path: Path) -> None:
    told: list[str] = []
    os.chown(write(tmp_path, lease()), 4321, 4321)
    assert urls(folder_of(tmp_path, Clock(), told)) == set()
    assert "belongs to user 4321" in told[0]


@pytest.mark.parametrize("mode", [0o770, 0o757, 0o777])
def test_a_folder_that_others_may_write_to_is_no_registry(tmp_path: Path, mode: int) -> None:
    write(tmp_path, lease())
    tmp_path.chmod(mode)
    with pytest.raises(RegistryDown, match=r"nobody else may write to it.*Write chmod 700"):
        urls(folder_of(tmp_path, Clock()))
    tmp_path.chmod(0o755)
    assert urls(folder_of(tmp_path, Clock())) == {URL}


def test_a_folder_that_is_deleted_keeps_whom_it_listed(tmp_path: Path) -> None:
    told: list[str] = []
    folder = tmp_path / "registry"
    folder.mkdir()
    file = write(folder, lease())

    async def story() -> None:
        discovery = Discovery(FleetConfig(), folder_of(folder, Clock()), [], told.append)
        await discovery.poll()
        assert discovery.wanted == {URL}
        file.unlink()
        await discovery.poll()  # it is there, and empty
        assert discovery.wanted == {URL}
        folder.rmdir()
        await discovery.poll()
        await discovery.poll()
        assert discovery.wanted == {URL}
        why = "No such file or directory; the servers that are known are kept"
        assert told == [f"the registry {folder} cannot be read: {why}"]
        folder.mkdir()
        write(folder, lease(8002))
        await discovery.poll()
        assert discovery.wanted == {"http://127.0.0.1:8002"}

    asyncio.run(story())


def test_without_discovery_those_of_the_start_are_all(tmp_path: Path) -> None:
    async def story() -> None:
        config = FleetConfig(enable_topology_discovery=False)
        discovery = Discovery(config, folder_of(tmp_path, Clock()), ["http://127.0.0.1:9000"])
        write(tmp_path, lease())
        await discovery.poll()
        write(tmp_path, lease(8002))
        await discovery.poll()
        assert discovery.wanted == {URL, "http://127.0.0.1:9000"}

    asyncio.run(story())


def test_without_discovery_nobody_joins_a_registry_that_was_empty_at_the_start(tmp_path: Path) -> None:
    async def story() -> None:
        config = FleetConfig(enable_topology_discovery=False)
        discovery = Discovery(config, folder_of(tmp_path, Clock()), ["http://127.0.0.1:9000"])
        await discovery.poll()
        write(tmp_path, lease())
        await discovery.poll()
        assert discovery.wanted == {"http://127.0.0.1:9000"}

    asyncio.run(story())


def test_a_folder_that_hangs_holds_one_thread_and_neither_the_loop_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("registries", "authority"):
        monkeypatch.setattr(f"ductile.fleet.registry.{module}.ASK_S", 0.05)

    async def story() -> None:
        registry, authority = folder_of(tmp_path, Clock()), FolderAuthority(tmp_path, "one", 15.0)
        assert await authority.claim() is not None
        before, goes_on = threading.active_count(), threading.Event()
        for name, call in (("scandir", os.scandir), ("listdir", os.listdir)):

            def hang(path: Path, call: Callable[[Path], object] = call) -> object:
                goes_on.wait(10.0)
                return call(path)

            monkeypatch.setattr(os, name, hang)
        try:
            for _ in range(4):
                for asked in (registry.servers, authority.claim):
                    with pytest.raises(RegistryDown, match="could not be read within"):
                        await asked()
            assert threading.active_count() <= before + 2
            await authority.close()
        finally:
            goes_on.set()
        assert await registry.servers() == {}

    asyncio.run(story())


def test_who_is_kept_out_and_until_when() -> None:
    clock = Clock()
    discovery = Discovery(FleetConfig(flap_limit=1, flap_backoff_seconds=10), StaticServers([URL]), [URL], clock=clock)
    discovery.lost(URL)
    assert "it may join in 10 s" in discovery.kept_out[URL]
    clock.now += 10
    assert discovery.wanted == {URL}
    discovery.reject(URL, "x", "another model")
    assert discovery.why_not(URL, "x") == "another model"
    assert discovery.why_not(URL, "y") == ""
    discovery.reject(URL, "", "refused our key")
    assert discovery.wanted == frozenset()
    discovery.strike(URL)
    assert "has been taken out" in discovery.why_not(URL)
    discovery.name(URL)
    assert discovery.wanted == {URL}


@pytest.mark.parametrize(
    ("url", "is_one"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://host.example:443", True),
        ("http://[::1]:8000", True),
        ("http://127.0.0.1", False),
        ("http://127.0.0.1:8000/", False),
        ("http://127.0.0.1:99999", False),
        ("ftp://127.0.0.1:8000", False),
        ("127.0.0.1:8000", False),
        ("http://a b:80", True),  # a name that nothing resolves
        ("", False),
    ],
)
def test_what_is_an_address_of_a_server(url: str, is_one: bool) -> None:
    assert is_root(url) == is_one


def test_a_token_is_read_from_no_file_but_the_server_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease may come from the network; what it names is sent to the address that it names."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "127.0.0.1-8001.json"
    file.write_text('{"host": "127.0.0.1", "port": 8001, "pid": 1, "token": "secret"}')
    file.chmod(0o600)
    assert token_of(URL, str(file)) == "secret"
    assert token_of("http://localhost:8001", str(file)) == "secret"
    assert token_of("http://127.0.0.1:8002", str(file)) is None
    assert token_of("http://10.0.0.9:8001", str(file)) is None, "a lease of somebody else names our file"
    file.chmod(0o644)
    assert token_of(URL, str(file)) is None
    other = tmp_path / "id_rsa"
    other.write_text("-----BEGIN")
    other.chmod(0o600)
    assert token_of(URL, str(other)) is None
    assert token_of(URL, str(tmp_path / "none")) is None
    assert token_of(URL) is None


def test_a_server_keeps_its_lease_and_says_when_it_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "made by the server"
    said: list[str] = []
    has_ended = False

    def lease_of() -> ServerLease:
        assert not has_ended, "its sockets are closed"
        return lease()

    registrar = Registrar(FileRegistry(folder=str(folder), ttl_seconds=0.15), lease_of, said.append)
    file = folder / lease_file(URL)

    def read() -> ServerLease:
        return lease_from(file.read_bytes())

    with registrar:
        eventually(lambda: file.exists() and read().beat >= 3)
        assert file.stat().st_mode & 0o077 == 0
        registrar.leave()
        assert read().is_leaving
        has_ended = True
    assert not file.exists()
    assert not [each for each in said if "removed" in each]
    assert not [each for each in threading.enumerate() if each.name == "ductile registrar"]


def test_a_server_that_cannot_renew_its_lease_serves_on_and_says_so_once(tmp_path: Path) -> None:
    folder, said = tmp_path / "registry", list[str]()
    folder.write_text("a file")
    with Registrar(FileRegistry(folder=str(folder), ttl_seconds=0.03), lease, said.append):
        eventually(lambda: len(said) > 0)
        folder.unlink()
        eventually((folder / lease_file(URL)).exists)
        assert len(said) == 1
        assert "will be tried again" in said[0]


def test_a_later_server_s_lease_is_not_removed_by_an_earlier_one(tmp_path: Path) -> None:
    with Registrar(FileRegistry(folder=str(tmp_path), ttl_seconds=60), lease, print):
        eventually((tmp_path / lease_file(URL)).exists)
        file = write(tmp_path, lease(incarnation="y"))
    assert file.exists()


def eventually(condition: Callable[[], bool]) -> None:
    end = threading.Event()
    for _ in range(1000):
        if condition():
            return
        end.wait(0.01)
    raise AssertionError("it did not come to that within 10 s")


def test_an_http_registry_lists_those_that_renew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_TOKEN", "a long token")

    async def story() -> None:
        clock = Clock()
        book = LeaseTable(15.0, clock)
        async with serve_registry(registry_app(book, "a long token")) as url:
            config = HttpRegistry(url=url, token_var="REGISTRY_TOKEN", ttl_seconds=0.3)
            registry = registry_of(config)
            registrar = Registrar(config, lease, print)
            registrar.__enter__()
            await asyncio.to_thread(eventually, lambda: bool(book.leases))
            assert {*await registry.servers()} == {URL}
            await asyncio.to_thread(registrar.leave)
            assert (await registry.servers())[URL].is_leaving
            await asyncio.to_thread(registrar.__exit__)
            assert await registry.servers() == {}
            book.put(lease())
            with_other = {"url": URL, "incarnation": "y"}
            async with httpx.AsyncClient(headers={"Authorization": "Bearer a long token"}) as client:
                assert (await client.delete(f"{url}/servers", params=with_other)).status_code == 204
                assert {*await registry.servers()} == {URL}, "the process before it has ended, and not this one"
            clock.now += 16
            assert await registry.servers() == {}
            await registry.close()

            denied = RegistryClient(url, None, 15.0)
            with pytest.raises(RegistryDown, match="responded with 401"):
                await denied.servers()
            await denied.close()
            async with httpx.AsyncClient(headers={"Authorization": "Bearer a long token"}) as client:
                for content in (b"{", b'{"url": "x", "incarnation": "y"}', b"x" * 100_000):
                    assert (await client.put(f"{url}/servers", content=content)).status_code == 422
                assert (await client.put(f"{url}/authority", content=b"[]")).status_code == 422
        with pytest.raises(RegistryDown, match="cannot be asked"):
            await RegistryClient(url, None, 15.0).servers()

    asyncio.run(story())


def test_a_registry_whose_reply_takes_ages_holds_no_server_up() -> None:
    said: list[str] = []

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        try:
            with suppress(ConnectionError):
                for _ in range(500):
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.01)
        finally:  # also where the test ends before
            writer.transport.abort()

    async def story() -> None:
        server = await asyncio.start_server(trickle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await announced(url, said)
        server.close()
        assert f"{url}/servers did not respond within 0.2 s" in said[0]

    asyncio.run(story())
    assert len(said) == 1
    assert not [each for each in threading.enumerate() if each.name == "ductile registrar"]


def test_a_registry_that_refuses_a_lease_is_told_of_with_its_status() -> None:
    said: list[str] = []

    async def story() -> None:
        async with serve_registry(registry_app(LeaseTable(15.0), "a token that the server lacks")) as url:
            await announced(url, said)
            assert f"{url}/servers responded with 401" in said[0]

    asyncio.run(story())
    assert len(said) == 1


async def announced(url: str, said: list[str]) -> None:
    """Have a server come and go."""
    registrar = Registrar(HttpRegistry(url=url, ttl_seconds=0.6), lease, said.append)
    registrar.__enter__()
    await asyncio.to_thread(registrar.leave)
    await asyncio.to_thread(registrar.__exit__)


def test_entries_of_others_in_an_http_registry_are_skipped() -> None:
    told: list[str] = []

    async def story() -> None:
        async def listing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            body = b'[{"pod": 1}, {"url": "http://127.0.0.1:8001", "incarnation": "x"}]'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(listing, "127.0.0.1", 0)
        registry = RegistryClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, 15.0, told.append)
        assert {*await registry.servers()} == {URL}
        await registry.close()
        server.close()

    asyncio.run(story())
    assert "is no lease of a server" in told[0]


def found_elsewhere(servers: list[str]) -> StaticServers:
    return StaticServers(servers)


def test_a_registry_of_the_user_s_own() -> None:
    config: RegistryConfig = CustomRegistry(
        import_path="tests.fleet.test_registry.found_elsewhere", kwargs={"servers": [URL]}
    )
    assert {*asyncio.run(registry_of(config).servers())} == {URL}
    assert asyncio.run(registry_of(None).servers()) == {}


def authorities(kind: str, place: str, clock: Clock) -> tuple[Authority, Authority]:
    if kind == "file":
        return FolderAuthority(Path(place), "one", 15.0, clock), FolderAuthority(Path(place), "two", 15.0, clock)
    return HttpAuthority(place, None, "one", 15.0), HttpAuthority(place, None, "two", 15.0)


@pytest.mark.parametrize("kind", ["file", "http"])
def test_one_controller_rules_and_another_one_once_it_is_gone(kind: str, tmp_path: Path) -> None:
    async def story() -> None:
        clock = Clock()
        async with serve_registry(registry_app(LeaseTable(15.0, clock))) as url:
            one, two = authorities(kind, str(tmp_path) if kind == "file" else url, clock)
            first = await one.claim()
            assert first is not None
            for _ in range(5):
                assert await two.claim() is None
                clock.now += 10
                assert await one.claim() == first
            assert await two.claim() is None
            clock.now += 16  # it has been killed, or stopped
            second = await two.claim()
            assert second is not None
            assert first_epoch(second) > first_epoch(first) + 1_000_000
            assert await one.claim() is None  # it goes on, and learns that it rules no more
            await two.close()
            third = await one.claim()
            assert third is not None
            assert third > second
            await one.close()

    asyncio.run(story())


def test_of_many_who_claim_at_the_same_time_one_rules(tmp_path: Path) -> None:
    async def story() -> None:
        claims = [FolderAuthority(tmp_path, f"c{number}", 15.0) for number in range(16)]
        tokens = await asyncio.gather(*(each.claim() for each in claims))
        assert len([token for token in tokens if token is not None]) == 1

    asyncio.run(story())


def test_a_folder_that_is_gone_makes_no_second_ruler(tmp_path: Path) -> None:
    with pytest.raises(RegistryDown):
        asyncio.run(FolderAuthority(tmp_path / "gone", "one", 15.0).claim())


def test_what_is_no_lease_says_why() -> None:
    with pytest.raises(LeaseError, match="says nothing of the server's incarnation"):
        lease_from(RUBBISH["who.json"])
