"""The page of the HTTP listener in headless Chromium.

Screenshots go to the folder `page` of cargo's target folder; `--screenshots docs/images` takes those
of the documentation instead.
"""

import argparse
import re
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/clients"))

from harness import PATIENCE, Server, inference, run_tests, wait_until

PROMPT = "def read_lines(path):\n"
MAX_TOKENS = 96
# Width and height of the view, in CSS pixels.
DESKTOP, PHONE = (1100, 1280), (390, 844)


class Page:
    """The page of a server in a fresh browser; used in a `with` block."""

    def __init__(self, server, screenshots):
        self.server, self.screenshots = server, screenshots
        self.url = re.search(r"^metrics and page on (\S+)$", server.log(), re.MULTILINE)[1]
        self.profile = tempfile.mkdtemp()
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in [
            "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
            "disable-background-networking", "disable-component-update", "disable-sync",
            "disable-dev-shm-usage", "hide-scrollbars", f"user-data-dir={self.profile}",
        ]:
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.browser = webdriver.Chrome(options, service)

    def __enter__(self):
        self.view(DESKTOP)
        self.browser.get(self.url)
        return self

    def __exit__(self, *_):
        self.browser.quit()
        shutil.rmtree(self.profile, ignore_errors=True)

    def view(self, size, scheme="light"):
        """Shows the page at a size, in a colour scheme."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def one(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.browser.execute_script(
            "return document.querySelector(arguments[0]).textContent", selector
        )

    def number(self, selector):
        """The number that an element shows, or 0."""
        digits = self.text(selector).replace(",", "")
        return float(digits) if re.fullmatch(r"[\d.]+", digits) else 0

    def fill(self, **values):
        for field, value in values.items():
            script = "document.getElementById(arguments[0]).value = arguments[1]"
            self.browser.execute_script(script, field.replace("_", "-"), value)

    def complete(self, prompt=PROMPT, max_tokens=MAX_TOKENS, **values):
        """Sends a prompt and waits for its summary."""
        self.fill(prompt=prompt, max_tokens=max_tokens, **values)
        self.one("#go").click()
        wait_until(lambda: self.one("#go").is_enabled(), "the end of a completion")
        return self.text("#summary")

    def errors(self):
        """What the console says in complaint."""
        return [entry for entry in self.browser.get_log("browser") if entry["level"] != "INFO"]

    def shot(self, name):
        self.screenshots.mkdir(parents=True, exist_ok=True)
        self.browser.save_screenshot(str(self.screenshots / f"{name}.png"))


def fresh(page):
    """Loads the page anew, and waits for its first figures."""
    page.view(DESKTOP)
    page.browser.get(page.url)
    wait_until(lambda: page.text("#state") == "serving", "the state of the engine")
    wait_until(lambda: page.one("#try").is_displayed(), "the prompt box")


def test_the_page_loads_and_shows_the_model(page):
    fresh(page)
    facts = page.text("#facts")
    assert "tiny-glm52" in facts and "3 drafts a step" in facts, facts
    assert page.one("#indexer").is_displayed()
    assert not page.errors(), page.errors()


def test_the_text_is_that_of_the_own_api(page):
    fresh(page)
    summary = page.complete()
    assert f"{MAX_TOKENS} tokens in " in summary and "ended by max tokens" in summary, summary
    stopping = inference.StoppingParams(max_tokens=MAX_TOKENS)
    request = inference.GenerateRequest(text=PROMPT, stopping=stopping)
    (whole,) = page.server.inference.Generate(request, timeout=PATIENCE).outputs
    assert page.text("#output") == whole.text != ""
    marked = page.browser.find_elements(By.CSS_SELECTOR, "#output .accepted")
    assert len(marked) > 0
    made = page.browser.find_elements(By.CSS_SELECTOR, "#output .target")
    assert len(marked) + len(made) == MAX_TOKENS
    # How many drafts are made follows from measured times, so each run counts its own.
    assert f" {len(marked)} of " in summary, summary
    line = "return getComputedStyle(arguments[0]).borderBottomStyle"
    color = "return getComputedStyle(arguments[0]).borderBottomColor"
    assert page.browser.execute_script(line, marked[0]) == "solid"
    plain = page.browser.execute_script(color, marked[0])
    assert plain != "rgba(0, 0, 0, 0)", "an accepted draft has a line below it"
    assert not page.errors(), page.errors()


def test_rejected_drafts_are_shown_on_hover_and_on_focus(page):
    fresh(page)
    page.complete()
    # A pointer goes to the middle of an element, where one that is broken over lines, or is a
    # line's end alone, is not.
    tokens = page.browser.find_elements(By.CSS_SELECTOR, "#output .rejected")
    pieces = "return arguments[0].getClientRects().length"
    token = next(
        of for of in tokens if page.browser.execute_script(pieces, of) == 1 and of.text.strip()
    )
    tip = page.one("#tip")
    assert not tip.is_displayed()
    ActionChains(page.browser).move_to_element(token).perform()
    wait_until(tip.is_displayed, "the rejected drafts under the pointer")
    assert re.match(r"rejected drafts? .", tip.text), tip.text
    page.shot("page")
    ActionChains(page.browser).move_to_element(page.one("h1")).perform()
    wait_until(lambda: not tip.is_displayed(), "no drafts elsewhere")
    page.browser.execute_script("arguments[0].focus()", token)
    wait_until(tip.is_displayed, "the rejected drafts of the token with the focus")
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait_until(lambda: not tip.is_displayed(), "no drafts after Escape")
    assert not page.errors(), page.errors()


def test_figures_move(page):
    fresh(page)
    steps = page.server.stats().steps
    before = page.number("#drafted")
    page.complete()
    wait_until(lambda: page.number("#drafted") > before, "more drafts")
    assert page.server.stats().steps > steps
    wait_until(lambda: page.number("#accepted") > 0, "accepted drafts")
    assert 1 < page.number("#length") <= 4
    bars = page.browser.find_elements(By.CSS_SELECTOR, "#positions li")
    assert len(bars) == 3 and "%" in bars[0].text, [bar.text for bar in bars]
    wait_until(lambda: page.one("#series .line").get_attribute("d").count(",") > 2, "a series")
    total = sum(page.number(f"#{part}") for part in ("used", "cached", "free"))
    assert total == page.server.stats().total_blocks


def endless(page):
    """Starts a completion that lasts until it is stopped."""
    page.server.wait_until_idle()
    page.fill(prompt=PROMPT, max_tokens=4000, temperature="1", seed="7")
    page.browser.execute_script("document.getElementById('ignore-eos').checked = true")
    page.one("#go").click()
    wait_until(lambda: page.text("#output"), "the first tokens")


def test_stop_frees_the_request(page):
    fresh(page)
    endless(page)
    # The focus goes from one button to the other, so that keys are enough.
    focused = lambda: page.browser.switch_to.active_element.get_attribute("id")
    assert focused() == "stop"
    page.one("#stop").send_keys(Keys.ENTER)
    wait_until(lambda: page.text("#summary"), "the end of the stopped completion")
    wait_until(lambda: focused() == "go", "the focus on the other button")
    assert page.text("#summary") == "Stopped.", page.text("#summary")
    page.server.wait_until_idle()
    metrics = urllib.request.urlopen(f"{page.url}/metrics").read().decode()
    assert 'tandem_outputs_finished_total{reason="cancelled"} 1\n' in metrics, metrics
    assert not page.errors(), page.errors()


def test_a_closed_page_frees_its_request(page):
    fresh(page)
    endless(page)
    page.browser.get("about:blank")
    page.server.wait_until_idle()


def test_a_refusal_is_shown_as_the_own_api_says_it(page):
    fresh(page)
    page.browser.execute_script("document.querySelector('form').noValidate = true")
    page.fill(temperature="-1")
    page.one("#go").click()
    wait_until(lambda: page.text("#summary"), "the refusal")
    assert "sampling.temperature" in page.text("#summary"), page.text("#summary")
    # Chromium itself notes the status.
    assert all("400" in error["message"] for error in page.errors())


def test_text_of_the_model_is_never_markup(page):
    fresh(page)
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    step = {"token_ids": [5, 6], "text_pieces": [text, text], "n_accepted": 1,
            "draft_token_ids": [5, 7], "draft_texts": [text, text]}
    page.browser.execute_script("addStep(arguments[0])", step)
    assert page.text("#output") == text * 2
    ActionChains(page.browser).move_to_element(page.one("#output .rejected")).perform()
    wait_until(page.one("#tip").is_displayed, "the rejected draft")
    assert text in page.one("#tip").text
    assert not page.browser.find_elements(By.CSS_SELECTOR, "#output b, #output img, #tip img")
    assert not page.errors(), page.errors()


def test_dark_and_narrow_views_fit(page):
    fresh(page)
    page.complete()
    lightness = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    overflow = "return document.documentElement.scrollWidth - innerWidth"
    backgrounds = {}
    for scheme in ("light", "dark"):
        for name, size in {"page": DESKTOP, "phone": PHONE}.items():
            page.view(size, scheme)
            assert page.browser.execute_script(overflow) <= 0, (scheme, name)
            page.browser.execute_script("scrollTo(0, 0)")
            if scheme == "dark":
                page.shot(f"{name}-dark")
        backgrounds[scheme] = sum(page.browser.execute_script(lightness))
    assert backgrounds["dark"] < 200 < 600 < backgrounds["light"], backgrounds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screenshots", type=Path, default=ROOT / "target/page")
    arguments = parser.parse_args()
    with Server("--num-speculative-tokens", "3", "--http-port", "0") as running:
        with Page(running, arguments.screenshots) as shown:
            run_tests(dict(globals()), shown)
