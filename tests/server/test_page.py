"""The page's paths: its files with a strict policy, its events behind the key, no text of another's namespace."""

import asyncio
import json
import re
import socket
from pathlib import Path

import httpx
import pytest
from support.http_server import listening_server
from support.server_app import NAME, Server, running_server
from support.waiting import until

import kvpage.server.page
from kvpage.server import ApiKey, ServerConfig
from kvpage.server.page.feed import MAX_WATCHERS

FILES = Path(kvpage.server.page.__file__).with_name("files")
SECRET = "the quick brown fox jumps over the lazy dog. "
KEYS = [ApiKey("a" * 20, "ann"), ApiKey("b" * 20, "bob"), ApiKey("c" * 20)]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def first_picture(server: Server, **headers: str) -> dict:
    """The first event of /kvpage/live, asked as an ASGI server asks: it never ends by itself."""
    messages, gone = asyncio.Queue(), asyncio.Event()
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": "/kvpage/live", "raw_path": b"/kvpage/live", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"server"), *raw], "server": ("server", 80), "client": ("client", 1),
    }  # fmt: skip

    async def receive() -> dict:
        await gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.ensure_future(server.app(scope, receive, messages.put))
    begin = await messages.get()
    assert begin["status"] == 200, begin
    body = (await messages.get())["body"]
    gone.set()
    await task
    assert body.startswith(b"data: ") and body.endswith(b"\n\n")
    return json.loads(body[6:])


def test_every_file_comes_with_its_type_and_a_strict_policy(server):
    async def ask() -> None:
        for name in ("", *(f"page/{path.name}" for path in FILES.iterdir())):
            response = await server.get(f"/{name}")
            path = FILES / (Path(name).name or "index.html")
            assert response.status_code == 200 and response.content == path.read_bytes()
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
        for name in ("page/none", "page/..%2f__init__.py", "page/__init__.py"):
            assert (await server.get(f"/{name}")).status_code == 404

    asyncio.run(ask())


def test_nothing_of_the_page_is_elsewhere_and_no_text_becomes_markup():
    """No foreign host, no script or style inside the page, and no call that reads text as HTML."""
    page, style, script = ((FILES / name).read_text() for name in ("index.html", "page.css", "page.js"))
    for text in (page, style, script):
        assert not re.search(r"https?://|//[a-z]+\.", text)
    assert not re.search(r"\sstyle=|\son\w+=|<script(?! src=)|<style", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", script)
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {link.removeprefix("/page/") for link in links} == {path.name for path in FILES.iterdir()} - {"index.html"}


def luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_can_be_read_in_light_and_dark():
    """A contrast of 4.5, as WCAG's level AA asks it."""
    schemes = re.findall(r":root \{(.*?)\}", (FILES / "page.css").read_text(), re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colors = {name: luminance(color) for name, color in re.findall(r"--([\w-]+): (#\w{6})", scheme)}
        for ink in ("ink", "soft", "bad", "found"):
            for ground in ("card", "ground"):
                darker, lighter = sorted((colors[ink], colors[ground]))
                assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (ink, ground)


def test_files_are_open_and_all_else_needs_the_key():
    with running_server(ServerConfig([NAME], KEYS)) as server:

        async def ask() -> None:
            assert (await server.get("/")).status_code == (await server.get("/page/page.js")).status_code == 200
            for path in ("/kvpage/about", "/kvpage/live"):
                for headers in ({}, bearer("x" * 20)):
                    response = await server.get(path, **headers)
                    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            about = (await server.get("/kvpage/about", **bearer("a" * 20))).json()
            assert (about["model"], about["has_chat_template"], about["block_size"]) == (NAME, True, 4)

        asyncio.run(ask())


async def complete(server: Server, prompt: str, salt: str | None = None, **headers: str) -> None:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 2}
    response = await server.post("/v1/completions", body | ({} if salt is None else {"cache_salt": salt}), **headers)
    assert response.status_code == 200


def shown(picture: dict) -> str:
    return "".join(prefix["text"] for prefix in picture["prefixes"])


@pytest.mark.parametrize("keys", [[], KEYS])
def test_a_viewer_sees_the_text_and_the_requests_of_nobody_else(keys):
    """By another key, by no salt where the text has one, and by another salt."""
    with running_server(ServerConfig([NAME], keys)) as server:
        ann, bob, cat = (bearer(key.key) if keys else {} for key in KEYS)

        async def ask() -> None:
            await complete(server, SECRET, "ann's salt", **ann)
            await complete(server, "def f(x): return x + 1", **ann)
            mine = await first_picture(server, **ann, x_cache_salt="ann%27s%20salt")
            assert SECRET[:20] in shown(mine) and "def f" in shown(mine) and len(mine["ended"]) == 2
            others = [await first_picture(server, **ann), await first_picture(server, **ann, x_cache_salt="guessed")]
            for picture in others:
                assert SECRET[:20] not in shown(picture) and "def f" in shown(picture) and len(picture["ended"]) == 1
            for viewer in (bob, cat) if keys else ():
                for salt in ({}, {"x_cache_salt": "ann%27s%20salt"}):
                    picture = await first_picture(server, **viewer, **salt)
                    assert picture["prefixes"] == picture["ended"] == picture["requests"] == []
                    assert picture["blocks"]["cached"] > 0, "numbers of all are seen"

        asyncio.run(ask())


def test_only_so_many_watch(server):
    async def ask() -> None:
        feed = server.app.state.service.feed
        watchers = [feed.watch((b"",)) for _ in range(MAX_WATCHERS)]
        for watcher in watchers:
            await anext(watcher)
        response = await server.get("/kvpage/live")
        assert response.status_code == 503 and "watch already" in response.json()["error"]["message"]
        for watcher in watchers:
            await watcher.aclose()
        assert (await first_picture(server))["blocks"]["total"] == 256 and feed.num_watchers == 0

    asyncio.run(ask())


def test_a_watcher_that_does_not_read_is_dropped(monkeypatch):
    """What the kernel and uvicorn hold for it is full at some time; then the feed waits no more."""
    monkeypatch.setattr("kvpage.server.routes.shown.page.SEND_TIMEOUT", 0.2)
    monkeypatch.setattr("kvpage.server.page.feed.INTERVAL", 0.0)
    monkeypatch.setattr("kvpage.server.page.feed.picture", lambda *parts: "x" * (1 << 20))
    with listening_server() as (url, server), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", httpx.URL(url).port))
        client.sendall(b"GET /kvpage/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        feed = server.app.state.service.feed
        until(lambda: feed.num_watchers == 1)
        until(lambda: feed.num_watchers == 0)
        assert httpx.get(f"{url}/health", timeout=300).status_code == 200


def test_a_watcher_that_goes_is_watched_for_no_more():
    with listening_server() as (url, server):
        feed = server.app.state.service.feed
        with httpx.stream("GET", f"{url}/kvpage/live", timeout=300) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.iter_lines()
            assert next(lines).startswith("data: {") and feed.num_watchers == 1
        until(lambda: feed.num_watchers == 0)
