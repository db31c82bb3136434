"""The page as a person meets it: a real Chromium types, reads and looks, at a server whose model repeats what it was told."""
import asyncio, json, re, shutil, socket, threading, time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn
from conftest import VOCAB_SIZE, FakeModel

import pico_vllm
from pico_vllm.engine import LLMEngine
from pico_vllm.page import LiveFeed, add_page
from pico_vllm.sampling import SamplingParams
from pico_vllm.server import create_app
from pico_vllm.service import SchedulerService
from pico_vllm.testing import byte_tokenizer
from pico_vllm.viz import OWNER_COLORS, contrast

USER, ASK, END = "\x01", "\x02", "\x03"  # what stands before a message, after the last one, and after an answer
HTML = """<img src=x onerror="window.pwned=1"><script>window.pwned=2</script><b>bold</b> & "quotes" 🫠"""


class Echo(FakeModel):
    "Repeats the last message, a byte a step, each step `pause` seconds long. Dies where it is told to."
    def __init__(self, pause=0.0):
        self.tokenizer, self.pause, self.heard = byte_tokenizer(), pause, []
        self.tokenizer.chat_template = f"{{% for m in messages %}}{USER}{{{{ m.content }}}}{{% endfor %}}{ASK}"
        self.user, self.ask, self.end = (self.tokenizer.encode(c)[0] for c in (USER, ASK, END))
        super().__init__(eos_token_ids=(self.end,))
        self.config.max_position_embeddings = 768

    def row(self, tokens):
        ask = len(tokens) - 1 - tokens[::-1].index(self.ask)
        prompt, said = tokens[:ask], len(tokens) - 1 - ask
        message = prompt[len(prompt) - prompt[::-1].index(self.user):]
        if not said: self.heard.append(self.tokenizer.decode(prompt))
        if self.tokenizer.decode(message) == "die": raise RuntimeError("the model was told to die")
        logits = torch.zeros(VOCAB_SIZE)
        logits[[*message, self.end][said]] = 50
        return logits

    def __call__(self, *args):
        time.sleep(self.pause)
        return super().__call__(*args)


@contextmanager
def serve(model, api_key=None, port=0, **config):
    "A real server in a thread of its own; its URL and its service."
    engine = LLMEngine.from_parts(model, model.tokenizer, **{"num_blocks": 192, "block_size": 4, "max_model_len": 768, **config})
    service = SchedulerService(engine)
    app = create_app(service, ["echo"], api_key)
    add_page(app, service)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started: time.sleep(.01)
    try: yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/", service
    finally:
        asyncio.run_coroutine_threadsafe(service.drain(), service._loop).result(10)
        server.should_exit = True
        thread.join()


def chat(url, text, **more):
    "One answer, in one piece."
    answer = httpx.post(url + "v1/chat/completions", json={"model": "echo", "messages": [{"role": "user", "content": text}], **more}, timeout=20)
    assert answer.status_code == 200, answer.text


def live_messages(url, until, seconds=15):
    "What /live says, until it is enough."
    seen, end = [], time.monotonic() + seconds
    with httpx.stream("GET", url + "live", timeout=10) as live:
        for line in live.iter_lines():
            assert time.monotonic() < end, f"not enough after {seconds} s, last: {seen[-1:]}"
            if line.startswith("data: "): seen.append(json.loads(line[6:]))
            if seen and until(seen): return seen


def wait(condition, seconds=8):
    "Its first true value. Fails with the last one after some seconds."
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"still {value!r} after {seconds} s"
        time.sleep(.03)
    return value


# Without a browser: the stream and the file

def test_colours_are_those_of_the_figures():
    html = Path(pico_vllm.__file__).with_name("page.html").read_text()
    assert json.loads(re.search(r"OWNER_COLORS = (\[.*?\])", html)[1]) == list(OWNER_COLORS)


def test_page_needs_nobody_else():
    html = Path(pico_vllm.__file__).with_name("page.html").read_text()
    assert set(re.findall(r"https?://[^'\"\s]+", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\son\w+=|style=", html)


def test_policy_and_open_paths():
    with serve(Echo(), api_key="secret") as (url, service):
        page = httpx.get(url)
        assert page.status_code == 200 and "unsafe" not in page.headers["content-security-policy"]
        assert httpx.get(url + "live").status_code == 401
        with httpx.stream("GET", url + "live", headers={"Authorization": "Bearer secret"}) as live: assert live.status_code == 200 and "text/event-stream" in live.headers["content-type"]


def test_stream_holds_no_text_and_counts_right():
    with serve(Echo(.005)) as (url, service):
        ask = threading.Thread(target=chat, args=(url, "xyzzy" * 12), kwargs=dict(n=2))
        ask.start()
        seen = live_messages(url, lambda seen: any(m["steps"] for m in seen) and not seen[-1]["state"]["num_running"])
        ask.join()
    assert "xyzzy" not in json.dumps(seen)
    steps = [s for m in seen for s in m["steps"]]
    assert [s["step"] for s in steps] == list(range(len(steps))), "a step is missing or told twice"
    assert sum(s["total"] for s in steps) == 2 * (62 + 60) and sum(s["decode"] for s in steps) == 2 * 60  # 62 prompt ids; 61 output ids, the last of which nobody computes
    for s in (m["state"] for m in seen): assert sum(len(r["blocks"]) for r in s["running"]) + s["num_free_blocks"] == s["num_blocks"]
    assert len({r["id"] for m in seen for r in m["state"]["running"]}) == 2 and len({r["request"] for m in seen for r in m["state"]["running"]}) == 1


def test_sleeping_reader_gets_the_newest_and_costs_the_others_nothing():
    model = Echo(.002)
    async def go():
        service = SchedulerService(LLMEngine.from_parts(model, model.tokenizer, num_blocks=96, block_size=4, max_model_len=384))
        feed = LiveFeed(service, interval=.01)
        async with service:
            sleeper, awake = feed.messages(), []
            first = json.loads(await anext(sleeper))  # and now it sleeps
            async def watch():
                async for message in feed.messages(): awake.append(json.loads(message))
            watcher = asyncio.ensure_future(watch())
            for word in ("a" * 150, "b" * 150):
                stream = await service.submit(USER + word + ASK, SamplingParams(temperature=0, max_tokens=200))
                async for output in stream: pass
            await asyncio.sleep(.1)
            late = json.loads(await anext(sleeper))
            watcher.cancel()
        assert not first["steps"] and len(awake) > 20
        assert late["state"]["num_running"] == 0 and late["state"]["num_free_blocks"] == 96
        newest = max(s["step"] for m in awake for s in m["steps"])
        assert newest > 250 and [s["step"] for s in late["steps"]] == list(range(newest - 199, newest + 1))
    asyncio.run(go())


def test_stopping_and_leaving_while_idle_is_told():
    "An abort makes no step; the watchers hear of it all the same."
    model = Echo(.01)
    async def go():
        service = SchedulerService(LLMEngine.from_parts(model, model.tokenizer, num_blocks=96, block_size=4, max_model_len=384))
        feed = LiveFeed(service, interval=.01, heartbeat=60)
        async with service:
            messages = feed.messages()
            stream = await service.submit(USER + "a" * 300 + ASK, SamplingParams(temperature=0, max_tokens=80))
            while not json.loads(await anext(messages))["state"]["num_running"]: pass
            stream.close()
            while (state := json.loads(await asyncio.wait_for(anext(messages), 2))["state"])["num_running"]: pass
            assert state["num_free_blocks"] == 96
            await service.drain()
            rest = [json.loads(m)["engine"] async for m in messages]
        assert rest == ["draining"]
    asyncio.run(go())


def test_preempted_are_told_apart_from_those_that_never_ran():
    with serve(Echo(.004), num_blocks=24, max_num_seqs=3, max_model_len=96) as (url, service):
        asks = [threading.Thread(target=chat, args=(url, chr(97 + i) * 40)) for i in range(4)]
        for t in asks: t.start()
        seen = live_messages(url, lambda seen: not any(t.is_alive() for t in asks) and not seen[-1]["state"]["num_running"])
    assert any(s["preempted"] for m in seen for s in m["steps"])
    for m in seen: assert m["state"]["num_preempted"] == sum(s["preempted"] for s in m["state"]["waiting"]), m
    assert {s["preempted"] for m in seen for s in m["state"]["waiting"]} == {True, False}


# With one

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync --window-size=1280,900".split()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not (CHROMIUM and DRIVER): pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"): options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield Browser(driver)
    driver.quit()


class Browser:
    "What a person does and sees."
    def __init__(self, driver): self.driver = driver
    def js(self, code, *args): return self.driver.execute_script(code, *args)
    def text(self, selector): return self.js("return document.querySelector(arguments[0])?.textContent", selector)
    def texts(self, selector): return self.js("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)
    def open(self, url):
        self.driver.get(url)
        wait(lambda: self.text("#status") == "live")
        return self
    def keys(self, *keys):
        from selenium.webdriver import ActionChains
        ActionChains(self.driver).send_keys(*keys).perform()
    def click(self, selector): self.js("document.querySelector(arguments[0]).click()", selector)
    def say(self, text, pane=0):
        self.js("document.querySelectorAll('.pane textarea')[arguments[0]].focus()", pane)
        self.js("document.activeElement.value = arguments[0]", text)
        self.keys("\ue007")
    def answers(self, pane=0): return self.js("return [...document.querySelectorAll('.pane')[arguments[0]].querySelectorAll('.assistant')].map(e => e.textContent)", pane)
    def running(self): return int(self.text("#running-count") or 0)
    def idle(self): return self.text("#running-count") == "0" and not self.js("return panes.some(p => p.abort)")
    def coloured(self): return self.js("const c = document.querySelector('#grid'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i + 3] && Math.max(d[i], d[i+1], d[i+2]) - Math.min(d[i], d[i+1], d[i+2]) > 40; return n")
    def cdp(self, name, **args): return self.driver.execute_cdp_cmd(name, args)
    def errors(self): return [e["message"] for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def site():
    model = Echo(.008)
    with serve(model) as (url, service):
        service.model = model
        yield url, service


def test_code_has_its_own_face(browser, site):
    browser.open(site[0])
    browser.js("panes[0].input.value = 'see\\n```py\\nx = \"<b>\"\\n```\\nend'; panes[0].say()")
    wait(lambda: browser.js("return document.querySelectorAll('.assistant code').length") == 1 and browser.idle())
    assert browser.js("const p = document.querySelector('.assistant'); return [...p.childNodes].map(n => [n.nodeName, n.textContent])") == [["#text", "see\n"], ["CODE", 'x = "<b>"\n'], ["#text", "end"]]


def test_of_a_large_pool_only_what_is_in_use(browser, site):
    browser.open(site[0])
    wait(lambda: browser.js("return state !== null"))
    drawn, cell, text, pointed = browser.js("""
        state = {...state, num_blocks: 5461, num_free_blocks: 5458, running: [{id: 1, request: "x", tokens: 20, blocks: [4000, 7]}, {id: 2, request: "y", tokens: 3, blocks: [12]}], num_running: 2};
        draw();
        $("#grid").dispatchEvent(new PointerEvent("pointermove", {clientX: $("#grid").getBoundingClientRect().x + 2 * cell + 3, clientY: $("#grid").getBoundingClientRect().y + 3}));
        return [drawn, cell, $("#blocks-count").textContent, $("#pointed").textContent];""")
    assert drawn == [7, 12, 4000] and cell >= 10 and text.startswith("3 of 5461 in use") and "free ones are not drawn" in text and pointed == "block 4000: sequence 1"


def test_numbers_that_cannot_be_are_not_sent(browser, site):
    browser.open(site[0])
    browser.js("$('#temperature').value = 9; panes[0].input.value = 'hi'; panes[0].say()")
    assert browser.js("return panes[0].input.value") == "hi" and browser.idle() and browser.texts(".user") == []


def test_type_stream_and_grid(browser, site):
    browser.open(site[0])
    assert browser.text("#model") == "echo" and browser.coloured() == 0
    browser.js("panes[0].log.style.height = '8rem'")  # so that little text is much
    browser.keys("hello there, ", *"engine " * 12)
    browser.keys("\ue007")
    part = wait(lambda: (browser.answers() or [""])[0])
    assert "hello there, engine".startswith(part[:19]) and browser.js("return document.querySelector('.pane form > [type=button]').hidden") is False
    wait(lambda: browser.coloured())
    assert browser.running() == 1 and browser.texts("#running li.own")[0].split(" · ")[1] == "Chat 1"
    assert re.match(r"sequence \d+: \d+ tokens in \d+ blocks", browser.text(".where"))
    first = browser.coloured()
    wait(lambda: browser.coloured() > first)  # it grows
    wait(browser.idle)
    assert browser.answers() == ["hello there, " + "engine " * 12] and browser.texts(".user") == browser.answers()
    wait(lambda: browser.coloured() == 0 and browser.text("#blocks-count").startswith("0 of 192"))
    browser.say("and again " * 6)  # the second turn brings the first along
    wait(lambda: len(browser.answers()) == 2 and browser.idle())
    assert browser.js("const l = panes[0].log; return l.clientHeight < 150 && l.scrollHeight > l.clientHeight && l.scrollHeight - l.scrollTop - l.clientHeight < 2"), "the log must scroll in itself, and be at its end"
    assert site[1].model.heard[-1].split(USER) == ["", *browser.texts(".log p")[:2], "and again " * 6] and browser.errors() == []


def test_several_chats_share_one_batch(browser, site):
    browser.open(site[0])
    for _ in range(2): browser.click("#new-chat")
    assert len(browser.texts(".pane")) == 3
    for pane in range(3): browser.say(f"chat number {pane} " * 9, pane)
    wait(lambda: browser.running() == 3 and len(browser.texts("#running li.own")) == 3)
    wait(lambda: browser.text("#step-count").endswith("3 decode"))
    assert len({browser.js("return getComputedStyle(document.querySelectorAll('.pane')[arguments[0]]).borderLeftColor", i) for i in range(3)}) == 3
    wait(browser.idle)
    for pane in range(3): assert browser.answers(pane) == [f"chat number {pane} " * 9]
    for _ in range(3): browser.click("#new-chat")
    assert len(browser.texts(".pane")) == 5 and browser.js("return document.querySelector('#new-chat').disabled")


def test_two_tabs(browser, site):
    browser.open(site[0])
    one = browser.driver.current_window_handle
    browser.say("the first tab " * 16)
    browser.driver.switch_to.new_window("tab")
    try:
        browser.open(site[0])
        wait(lambda: browser.running() == 1)
        assert browser.texts("#running li.own") == []  # somebody else's
        browser.say("the second tab " * 6)
        wait(lambda: browser.running() == 2 and len(browser.texts("#running li.own")) == 1)
        browser.driver.switch_to.window(one)
        wait(lambda: browser.running() == 2)
        browser.driver.switch_to.window(browser.driver.window_handles[-1])
        wait(lambda: browser.answers() == ["the second tab " * 6])
    finally:
        browser.driver.close()
        browser.driver.switch_to.window(one)
    wait(lambda: browser.answers() == ["the first tab " * 16])


def test_texts_are_never_html(browser, site):
    browser.open(site[0])
    browser.say(HTML)
    wait(lambda: browser.idle() and browser.answers())
    assert browser.texts(".user") == [HTML] and browser.answers() == [HTML]
    assert browser.js("return document.querySelectorAll('.log img, .log script, .log b').length") == 0 and browser.js("return window.pwned") is None
    browser.js("const s = document.createElement('script'); s.textContent = 'window.pwned = 3'; document.body.append(s)")  # and had it come in: the policy
    assert browser.js("return window.pwned") is None
    assert any("Content Security Policy" in e for e in browser.errors())


def test_keyboard_alone(browser, site):
    browser.open(site[0])
    assert browser.js("return document.activeElement.labels[0].textContent") == "Chat 1: your message"
    browser.keys("one")
    browser.js("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, cancelable: true}))")  # a word of Japanese is being chosen
    from selenium.webdriver import ActionChains, Keys
    ActionChains(browser.driver).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).send_keys("two " * 40).perform()
    assert browser.js("return document.activeElement.value") == "one\n" + "two " * 40 and browser.texts(".user") == []
    browser.keys(Keys.ENTER)
    wait(lambda: (browser.answers() or [""])[0].startswith("one\n"))
    browser.keys(Keys.ESCAPE)
    wait(lambda: browser.idle() and browser.text("#blocks-count").startswith("0 of 192"))
    assert browser.texts(".note") == ["stopped"] and 0 < len(browser.answers()[0]) < 100
    seen = []
    for _ in range(9):
        browser.keys(Keys.TAB)
        seen.append(browser.js("const e = document.activeElement; return [e.id || e.textContent, getComputedStyle(e).outlineStyle]"))
    reached = [name for name, _ in seen]
    assert [n for n in ("Send", "running", "waiting", "preempted") if n not in reached] == [] and all(style == "solid" for name, style in seen if name in ("Send", "running")), seen
    browser.js("document.querySelector('#new-chat').focus()")
    browser.keys(Keys.ENTER)
    assert browser.js("return document.activeElement.labels[0].textContent") == "Chat 2: your message"
    unnamed = browser.js("return [...document.querySelectorAll('button, input, textarea')].filter(e => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim())).map(e => e.outerHTML)")
    assert unnamed == [] and browser.js("return document.querySelector('.log').getAttribute('aria-live')") == "polite"


def test_phone(browser, site):
    browser.cdp("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    try:
        browser.open(site[0])
        browser.say("W" * 150)
        wait(lambda: browser.answers() == ["W" * 150])
        too_wide = browser.js("return [document.documentElement.scrollWidth, ...[...document.querySelectorAll('body *')].map(e => Math.ceil(e.getBoundingClientRect().right))].filter(w => w > 360)")
        assert browser.js("const l = panes[0].log; return l.scrollWidth === l.clientWidth")
        assert too_wide == [] and browser.js("return innerWidth") == 360
    finally: browser.cdp("Emulation.clearDeviceMetricsOverride")


COLOURS = """const shade = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(', 0)')) return c; } };
return [...document.querySelectorAll('h1, h2, h3, p, button, label, li, .where, #status, input, textarea')].filter(e => e.offsetParent && !e.disabled && !e.closest('.unseen')).map(e => [e.textContent.slice(0, 30), getComputedStyle(e).color, shade(e)])"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser, site, scheme):
    browser.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        browser.open(site[0])
        browser.say("hello " * 15)
        wait(lambda: browser.running() == 1 and browser.coloured())
        def hexed(rgb): return "#" + "".join(f"{int(v):02x}" for v in re.findall(r"\d+", rgb)[:3])
        found = [(text, contrast(hexed(ink), hexed(paper))) for text, ink, paper in browser.js(COLOURS)]
        assert len(found) > 15 and [f for f in found if f[1] < 4.5] == []
        dark = contrast(hexed(browser.js("return getComputedStyle(document.body).backgroundColor")), "#ffffff") > 10
        assert dark == (scheme == "dark")
        wait(browser.idle)
    finally: browser.cdp("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
def test_reads_a_stream_cut_anywhere(browser, site, end):
    browser.open(site[0])
    text = end.join(["data: eins 🫠", "", ": a comment", "", "event: x", "data:zwei", "data: drei", "", "data: [DONE]", "", ""])
    read = """const [text, size, done] = arguments, bytes = new TextEncoder().encode(text), seen = [];
    const body = new ReadableStream({start(c) { for (let i = 0; i < bytes.length; i += size) c.enqueue(bytes.slice(i, i + size)); c.close(); }});
    (async () => { for await (const data of events(new Response(body))) seen.push(data); done(seen); })()"""
    for size in (1, 3, 1000): assert browser.driver.execute_async_script(read, text, size)[:2] == ["eins 🫠", "zwei\ndrei"]


def test_half_an_answer_is_called_so(browser, site):
    browser.open(site[0])
    browser.js("""window.fetch = async () => new Response('data: {"id": "x", "choices": [{"delta": {"content": "half"}}]}\\n\\n')""")
    browser.say("whole?")
    assert "broke off" in wait(lambda: browser.text(".log .error")) and browser.answers() == ["half"]


def test_asks_for_the_key(browser):
    with serve(Echo(), api_key="secret") as (url, service):
        browser.driver.get(url)
        wait(lambda: not browser.js("return document.querySelector('#key').hidden"))
        assert "API key" in browser.text("#status")
        browser.keys("wrong\ue007")
        wait(lambda: not browser.js("return document.querySelector('#key').hidden"))
        browser.keys("secret\ue007")
        wait(lambda: browser.text("#status") == "live")
        browser.say("with a key")
        wait(lambda: browser.answers() == ["with a key"])
        assert browser.js("return [sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        browser.js("sessionStorage.clear()")


def test_says_when_the_connection_is_lost_and_comes_back(browser):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with serve(Echo(.01), port=port) as (url, service):
        browser.open(url)
        browser.say("never to be finished " * 10)
        wait(lambda: (browser.answers() or [""])[0])
    wait(lambda: "connection lost" in browser.text("#status"))
    wait(lambda: browser.texts(".log .error"))
    with serve(Echo(), port=port) as (url, service):
        wait(lambda: browser.text("#status") == "live", 12)
        browser.say("back again")
        wait(lambda: browser.answers()[-1] == "back again")


def test_says_when_the_engine_is_dead(browser):
    with serve(Echo()) as (url, service):
        browser.open(url)
        browser.say("die")
        wait(lambda: "dead" in browser.text("#status"))
        assert "dead" in wait(lambda: browser.text(".log .error"))
        assert browser.js("return document.querySelector('.pane textarea').value") == "die"  # to send it again
