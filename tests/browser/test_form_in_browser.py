"""The form in JupyterLab in a real Chromium: from an empty notebook to the report."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec

import nbformat
import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from rloo_kit.config.run_file import read_run_file

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not shutil.which("chromium"), reason="there is no Chromium"),
    pytest.mark.skipif(find_spec("jupyterlab") is None, reason="there is no JupyterLab"),
]

SECONDS = 90  # for whatever is waited for
SMALL = "trainer.per_device_train_batch_size=16\ndata.held_out=16\n"


@pytest.fixture
def lab(tmp_path):
    """The address of JupyterLab in a folder with an empty notebook."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cells = [nbformat.v4.new_code_cell("")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "empty.ipynb")
    own = {name: str(tmp_path / name.lower()) for name in
           ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
            "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")}  # fmt: skip
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
        "--IdentityProvider.token=", f"--ServerApp.root_dir={tmp_path}",
        "--LabApp.extension_manager=readonly",
    ]  # fmt: skip
    environment = {**os.environ, **own, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(10 * SECONDS):
            try:
                urllib.request.urlopen(f"{address}/api").close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "server.log").read_text()
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()  # ends its kernels too
        try:
            server.wait(30)
        finally:
            server.kill()


class FormPage:
    """The form as a person sees it."""

    def __init__(self, driver):
        self.driver = driver
        # JupyterLab draws parts of the page again, so an element may go stale before it is used
        self.wait = WebDriverWait(driver, SECONDS, 0.2, [StaleElementReferenceException])

    def open(self, address):
        self.driver.set_window_size(1500, 1400)
        self.driver.get(f"{address}/lab/tree/empty.ipynb")
        self.wait.until(self.clicks_the_cell, "the notebook has no cell that can be clicked")
        ActionChains(self.driver).send_keys(
            "import rloo_kit as rk", Keys.ENTER, "rk.form()"
        ).perform()
        # Nothing is run while the kernel starts, whatever the page says of it
        stale = [StaleElementReferenceException]
        WebDriverWait(self.driver, SECONDS, 3, stale).until(self.runs_the_cell)
        self.wait.until(lambda d: self.field("model").is_displayed(), "the form is not shown")

    def clicks_the_cell(self, driver):
        line = driver.find_element(By.CSS_SELECTOR, ".jp-Notebook .jp-CodeCell .cm-line")
        if not (line.is_displayed() and line.is_enabled()):
            return False
        line.click()
        return True

    def runs_the_cell(self, driver):
        prompt = driver.find_element(By.CSS_SELECTOR, ".jp-CodeCell .jp-InputPrompt")
        if prompt.text != "[ ]:":
            return True
        keys = ActionChains(driver).key_down(Keys.CONTROL)
        keys.send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
        return False

    def field(self, name):
        label = f"//label[normalize-space()='{name}']"
        path = f"{label}/following-sibling::*[self::input or self::textarea]"
        return self.driver.find_element(By.XPATH, path)

    def part(self, name):
        return self.driver.find_element(By.CSS_SELECTOR, f".rloo-kit-{name}")

    def button(self, name):
        path = f"//button[contains(@class, 'widget-button') and normalize-space()='{name}']"
        return self.driver.find_element(By.XPATH, path)

    def press(self, name):
        self.wait.until(lambda d: self.clicks(name), f"{name} is not enabled")

    def clicks(self, name):
        button = self.button(name)
        if not button.is_enabled():
            return False
        button.click()
        return True

    def type(self, name, text):
        field = self.field(name)
        field.click()
        ActionChains(self.driver).key_down(Keys.CONTROL).send_keys("a").key_up(
            Keys.CONTROL
        ).perform()
        ActionChains(self.driver).send_keys(text or Keys.DELETE).perform()

    def says(self, name, text):
        self.wait.until(lambda d: text in self.part(name).text, f"{name} does not say {text!r}")


MISTAKES = {
    "settings": ("trainer.num_generation=8", "did you mean 'num_generations'?"),
    "rewards": ("accuracy, {name", "must be a valid list"),
}


def a_mistake_gives_its_sentence(page):
    for name, (text, sentence) in MISTAKES.items():
        right = page.field(name).get_attribute("value")
        page.type(name, text)
        page.press("plan")
        page.says("status", sentence)
        page.type(name, right)


def test_from_an_empty_notebook_to_the_report(lab, chromium, tmp_path):
    page = FormPage(chromium)
    page.open(lab)
    a_mistake_gives_its_sentence(page)
    page.press("plan")
    page.says("status", "plan: done")
    page.says("log", "fits")

    page.type("settings", f"{SMALL}trainer.max_steps=3")
    page.press("train")
    page.says("status", "train: done")
    figure = page.part("figure")
    assert figure.find_element(By.TAG_NAME, "img").is_displayed()
    assert "step 3/3" in figure.text
    chromium.switch_to.frame(page.part("report").find_element(By.TAG_NAME, "iframe"))
    page.wait.until(lambda d: d.find_element(By.ID, "name").text == "quickstart")
    chromium.switch_to.default_content()
    assert read_run_file(tmp_path / "form.yaml").trainer["max_steps"] == 3

    # The notebook's own stop button, and then resume
    page.type("settings", f"{SMALL}trainer.max_steps=100\noutput_dir=runs/long")
    page.press("train")
    page.says("log", "step   2/100")
    chromium.find_element(By.CSS_SELECTOR, "[data-command='notebook:interrupt-kernel']").click()
    page.says("status", "train: stopped")
    assert "by the user" in (tmp_path / "runs/long/end.json").read_text()
    assert page.button("resume").is_enabled()
