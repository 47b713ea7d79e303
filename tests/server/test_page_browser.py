"""The page in a real browser: a chat whose second turn finds the first, pictures that move, text that stays text."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Browser, chromium
from support.http_server import listening_server
from support.server_app import NAME, Server

from kvpage.server import ApiKey, ServerConfig

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
MARKUP = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
LIVE, DONE = "document.querySelector('#live').dataset.state === 'on'", "document.querySelector('#stop').hidden"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as found:
        found.show(1280, 900)
        yield found


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Server]]:
    with listening_server() as found:
        yield found


def texts(browser: Browser, selector: str) -> list[str]:
    return json.loads(
        browser.value(f"JSON.stringify([...document.querySelectorAll({selector!r})].map(one => one.textContent))")
    )


def say(browser: Browser, text: str, settings: str = "settings.maxTokens = '8'; settings.temperature = '0'") -> None:
    """Type a message, press Enter and wait for the end of its answer."""
    browser.value(settings)
    num_messages = len(texts(browser, ".message"))
    browser.value("document.querySelector('#prompt').focus()")
    browser.type(text)
    browser.press_enter()
    browser.wait_for(f"document.querySelectorAll('.message').length === {num_messages + 2} && {DONE}")


def test_a_second_turn_finds_the_first_and_the_picture_moves(browser, served):
    url, server = served
    browser.open(url)
    browser.wait_for(f"{LIVE} && pictures.length > 0")
    assert texts(browser, "#prefixes, #lanes") == ["No request yet.", "Nothing is cached yet."]
    before = browser.value("document.querySelector('#device-chart').toDataURL()")
    for text in ("the quick brown fox", "jumps over the lazy dog"):
        say(browser, text)
    assert texts(browser, ".message.user p") == ["the quick brown fox", "jumps over the lazy dog"]
    assert texts(browser, ".message .error") == []
    facts = [json.loads(one) for one in _facts(browser)]
    assert facts[0]["cached"] == 0 < facts[1]["cached"] < facts[1]["prompt"] and facts[1]["generated"] == 8
    assert f"{facts[1]['cached']} of {facts[1]['prompt']} cached" in texts(browser, ".facts")[1]
    browser.wait_for("document.querySelectorAll('.lane').length === 2 && pictures.at(-1).running === 0")
    browser.wait_for(
        f"document.querySelector('#device-chart').toDataURL() !== {json.dumps(before)}"
    )  # at the next frame
    last = json.loads(browser.value("JSON.stringify(pictures.at(-1))"))
    assert last["tokens"]["cached"] == facts[1]["cached"] == dict(last["hits"])["device"]
    assert last["tokens"]["prompt"] == facts[0]["prompt"] + facts[1]["prompt"]
    assert last["blocks"]["cached"] == server.engine.stats().blocks.num_evictable_blocks > 0
    assert "user: the quick brown fox" in "".join(texts(browser, "#prefixes code"))
    rate = f"{100 * last['tokens']['cached'] / last['tokens']['prompt']:.0f} %"
    assert texts(browser, "#hit-rate") == [rate] and rate in texts(browser, "#hits-key li.device")[0]
    assert browser.trouble == []


def _facts(browser: Browser) -> list[str]:
    shown = "conversations[current].turns.filter(one => one.facts).map(one => JSON.stringify(one.facts))"
    return json.loads(browser.value(f"JSON.stringify({shown})"))


def test_markup_in_a_prompt_stays_text(browser, served):
    url, _ = served
    browser.open(url)
    browser.wait_for(LIVE)
    browser.click("#new")
    say(browser, MARKUP)
    browser.wait_for("document.querySelector('#prefixes').textContent.includes('<img src=x')")
    assert texts(browser, ".message.user p")[-1] == MARKUP
    assert browser.value("document.title") == "kvpage" and browser.value("document.images.length") == 1
    assert browser.value("document.querySelectorAll('main img, main script').length") == 0
    assert browser.trouble == []


def test_an_answer_is_stopped_and_its_request_goes(browser, served, monkeypatch):
    url, server = served
    step = server.engine.loop.try_step
    monkeypatch.setattr(server.engine.loop, "try_step", lambda: time.sleep(0.03) or step())
    browser.open(url)
    browser.wait_for(LIVE)
    browser.value("settings.maxTokens = ''")
    browser.value("document.querySelector('#prompt').focus()")
    browser.type("0123456789")
    browser.press_enter()
    browser.wait_for("!document.querySelector('#stop').hidden && document.querySelector('.going p').textContent")
    browser.click("#stop")
    browser.wait_for(DONE)
    browser.wait_for("pictures.at(-1).ended.some(one => one.stage === 'abort') && pictures.at(-1).running === 0")
    assert server.live.stats().num_unfinished == 0 and texts(browser, ".message .error") == []


def test_a_refused_message_ends_no_conversation(browser, served):
    url, _ = served
    browser.open(url)
    browser.wait_for(LIVE)
    browser.click("#new")
    say(browser, "x" * 9000)
    assert len(texts(browser, ".message .error")) == 1
    say(browser, "the quick brown fox")
    assert len(texts(browser, ".message .error")) == 1, "the next message is answered"
    browser.value("document.querySelectorAll('.message.user .act')[0].click()")
    assert browser.value("document.querySelector('#prompt').value.length") == 9000
    assert texts(browser, ".message") == [], "it is taken back, and so is what followed"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width, height", [(360, 700), (800, 700), (1600, 900)])
def test_nothing_is_wider_than_the_window(browser, served, scheme, width, height):
    url, _ = served
    browser.show(width, height, scheme)
    browser.open(url)
    browser.wait_for(f"{LIVE} && pictures.length > 0")
    for view in ("chat", "cache"):
        browser.value(f"document.querySelector('[data-show={view}]').click()")
        assert browser.value("document.documentElement.scrollWidth") <= width
        seen = "[...document.querySelectorAll('main > section')].filter(one => one.clientWidth).length"
        assert browser.value(seen) == (1 if width <= 960 else 2)
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 384) == (scheme == "light")
    browser.show(1280, 900)


def test_a_key_is_asked_for_and_used(browser):
    key = "k" * 20
    with listening_server(ServerConfig([NAME], [ApiKey(key, "ann")])) as (url, _):
        browser.open(url)
        browser.wait_for("document.querySelector('#settings').open")
        assert browser.value("pictures.length") == 0 and texts(browser, "#model") == [""]
        browser.value("document.querySelector('#api-key').focus()")
        browser.type(key)
        browser.click("#close-settings")
        browser.wait_for(f"{LIVE} && pictures.length > 0")
        say(browser, "the quick brown fox")
        browser.wait_for("document.querySelector('#prefixes').textContent.includes('quick brown')")
        browser.open("about:blank")


def test_the_page_comes_back_after_its_server(browser, tmp_path: Path):
    with listening_server() as (url, _):
        browser.open(url)
        browser.wait_for(f"{LIVE} && pictures.length > 0")
    browser.wait_for("document.querySelector('#live').dataset.state === 'bad'")
    port = int(url.rpartition(":")[2])
    with listening_server(port=port):
        browser.wait_for(LIVE)
        browser.open("about:blank")
