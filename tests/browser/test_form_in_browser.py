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
from selenium.webdriver import Keys
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
        line = ".jp-Notebook .jp-CodeCell .cm-line"
        self.click(lambda: self.driver.find_element(By.CSS_SELECTOR, line))
        self.keys("import rloo_kit as rk", Keys.ENTER, "rk.form()")
        # Nothing is run while the kernel starts, whatever the page says of it
        stale = [StaleElementReferenceException]
        WebDriverWait(self.driver, SECONDS, 3, stale).until(self.runs_the_cell)
        self.wait.until(lambda d: self.field("model").is_displayed(), "the form is not shown")

    def click(self, find):
        """Click what ``find`` gives as soon as that can be clicked."""

        def clicks(driver):
            found = find()
            if not (found.is_displayed() and found.is_enabled()):
                return False
            found.click()
            return True

        self.wait.until(clicks)

    def runs_the_cell(self, driver):
        prompt = driver.find_element(By.CSS_SELECTOR, ".jp-CodeCell .jp-InputPrompt")
        if prompt.text != "[ ]:":
            return True
        self.keys(Keys.CONTROL, Keys.ENTER)
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
        self.click(lambda: self.button(name))

    def keys(self, *keys):
        self.driver.switch_to.active_element.send_keys(*keys)

    def type(self, name, text):
        self.field(name).click()
        self.keys(Keys.CONTROL, "a", Keys.NULL, text)

    def says(self, name, text):
        self.wait.until(lambda d: text in self.part(name).text, f"{name} does not say {text!r}")


def test_from_an_empty_notebook_to_the_report(lab, chromium, tmp_path):
    page = FormPage(chromium)
    page.open(lab)
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
