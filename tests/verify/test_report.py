"""The report page: self-contained, complete, and without console errors where a browser is at hand."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from lowbit import evaluate, pipeline, report, verify
from lowbit.errors import OutputError, SourceError
from lowbit.folder import EVALUATION, KERNELS
from lowbit.recipe import Recipe

# as lowbit_kernels.tables.write_table writes them
TUNED = {
    "device": "NVIDIA H200",
    "arch": "sm_90",
    "date": "2026-11-29",
    "rows": [
        {
            "problem": {
                "bits": 4,
                "group_size": 128,
                "has_zero": False,
                "act_dtype": "float16",
                "m_bucket": m,
            }
            | {"n": n, "k": 4096, "arch": "sm_90", "order": "fragment"},
            "config": {"variant": "fragment"},
            "us": us,
            "rel_err": 2e-4,
        }
        for n in (4096, 14336)
        for m, us in ((1, 8.0), (16, 9.0), (256, 60.0))
    ],
}
VOID = {"meta", "link", "br", "wbr"}


@pytest.fixture(scope="module")
def page(build_llama, tmp_path_factory):
    """(folder, report page) of an output whose worst layer is known: its weights are mostly noise."""
    source = build_llama()
    out = tmp_path_factory.mktemp("report") / "<model> & co"
    pipeline.quantize(
        source,
        out,
        Recipe(
            method="rtn", group=64, rules=({"match": "re:.*0.self_attn.o_proj$", "bits": 4, "group": 256},)
        ),
    )
    (out / KERNELS).write_text(json.dumps(TUNED))
    evaluate.evaluate(out, source, window=64, max_tokens=256).save(out)
    verified = verify.verify(out, source, forward=False)
    return out, report.report(out, verified=verified).read_text()


class Balance(HTMLParser):
    """Checks that elements are closed in order, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_well_formed_and_says_what_matters(page):
    out, html = page
    parser = Balance()
    parser.feed(html)
    assert parser.open == []
    text = " ".join("".join(parser.text).split())
    manifest = json.loads((out / "lowbit.json").read_text())
    worst = max(manifest["layers"], key=lambda row: row["errors"]["output_error"])
    assert worst["name"].endswith("0.self_attn.o_proj")
    assert f"Worst layer: {worst['name']}, output error {100 * worst['errors']['output_error']:.1f}" in text
    assert text.count("before after") == report.HISTOGRAMS
    assert "<model> & co" in text
    assert "verified0 findings" in text
    assert "not verified" not in text
    assert "KL to the source" in text
    # every layer can be pointed at in the heat map
    assert all(f"<title>{row['name']}: output error" in html for row in manifest["layers"])


def test_what_verify_found_is_on_the_page(page, tmp_path):
    out, _ = page
    folder = shutil.copytree(out, tmp_path / "out")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"<b>bold!")
    verified = verify.verify(folder, forward=False)
    html = report.report(folder, verified=verified).read_text()
    assert "What verify found" in html
    assert "model.<wbr>safetensors: is not the file that was written: its SHA-256 differs" in html


def test_tasks_and_scores_without_a_source_have_their_columns(page, tmp_path):
    out, html = page
    assert '<th class="number">KL p99</th>' in html
    folder = shutil.copytree(out, tmp_path / "out")
    result = json.loads((folder / EVALUATION).read_text())
    for scores in (result["total"], *result["domains"].values()):
        scores |= dict.fromkeys(("source_perplexity", "kl_mean", "kl_error", "kl_p99", "top1"))
    result["tasks"] = {"arc_<easy>": {"acc": 0.5, "acc_stderr": 0.125}}
    (folder / EVALUATION).write_text(json.dumps(result))
    html = report.report(folder).read_text()
    assert "KL p99" not in html
    assert '<td class="name">arc_&lt;easy&gt;</td><td>acc</td><td class="number">0.5000</td>' in html


def test_a_page_made_without_verify_says_so(page, tmp_path):
    out, _ = page
    assert "<b>not verified</b>" in report.report(out, tmp_path / "page.html").read_text()


def test_nothing_comes_from_a_network(page):
    _, html = page
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", html)
    assert all(link.startswith(("#", "data:")) for link in links), links
    assert "<script" not in html


def test_colours_follow_the_page(page):
    """No ink of matplotlib's own is left: it would vanish on one of the two backgrounds."""
    _, html = page
    for colour in report.VARIABLES:
        assert colour not in html
    assert html.count("var(--ink)") > 20


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it_without_complaint(page, tmp_path, width, dark):
    """In a frame of the given width, nothing sticks out to the right and the console stays empty."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here: apt-get install chromium")
    _, html = page
    script = (
        "<script>addEventListener('load',()=>{document.body.dataset.excess="
        "document.documentElement.scrollWidth-document.documentElement.clientWidth;"
        "document.body.dataset.paper=getComputedStyle(document.body).backgroundColor})</script></body>"
    )
    (tmp_path / "page.html").write_text(html.replace("</body>", script))
    (tmp_path / "frame.html").write_text(
        f"<iframe id=f src=page.html style='width:{width}px;height:900px;border:0'></iframe>"
        "<script>addEventListener('load',()=>setTimeout(()=>{document.body.dataset.result="
        "JSON.stringify(document.getElementById('f').contentDocument.body.dataset)},300))</script>"
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [
        "--enable-logging=stderr",
        "--window-size=1500,1000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=4000"]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr
    result = json.loads(re.search(r'data-result="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))
    assert int(result["excess"]) == 0
    assert result["paper"] == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_experts_share_a_cell_and_the_worst_of_them_shows():
    rows = [
        report.Row(f"model.layers.3.mlp.experts.{i}.up_proj", "int4 sym g32", error, error, 20.0, None)
        for i, error in ((7, 0.4), (2, 0.2))
    ]
    svg = report.heat_map(rows)
    assert svg.count("<title>model") == 1
    assert "experts.7.up_proj: output error 40.0" in svg


def test_an_untuned_table_is_called_that(page, tmp_path):
    out, _ = page
    table = {
        "tuned": False,
        "device": None,
        "arch": "sm_90",
        "rows": [row | {"us": None} for row in TUNED["rows"]],
    }
    folder = shutil.copytree(out, tmp_path / "out")
    (folder / KERNELS).write_text(json.dumps(table))
    html = report.report(folder).read_text()
    assert "6 kernel configs for sm_90, not measured" in html
    assert "Measured speed" not in html


def test_a_folder_without_manifest_is_refused(page, tmp_path):
    out, _ = page
    folder = shutil.copytree(out, tmp_path / "out")
    (folder / "lowbit.json").unlink()
    with pytest.raises(SourceError, match=r"no lowbit\.json"):
        report.report(folder)


def test_measured_kernels_become_points_under_a_roof(page):
    """4096 x 4096 at 4 bits, 8 microseconds: 8 MiB of codes, 256 KiB of scales, 16 KiB of activations."""
    point = report.kernel_points(TUNED)[0]
    assert point.nbytes == 4096 * 4096 // 2 + 4096 * 32 * 2 + 2 * 2 * 4096
    assert point.gb_per_second == pytest.approx(point.nbytes / 8e-6 / 1e9)
    assert point.tflops == pytest.approx(2 * 4096 * 4096 / 8e-6 / 1e12)
    _, html = page
    assert "Measured speed of the tuned kernels on NVIDIA H200" in html
    assert html.count("<td>fragment</td>") == 6
    assert report.kernel_points(None) == []


@pytest.mark.parametrize(("out", "said"), [(".", "a folder"), ("nowhere/page.html", "no such folder")])
def test_a_page_that_cannot_be_a_file_is_refused(page, tmp_path, out, said):
    with pytest.raises(OutputError, match=said):
        report.report(page[0], tmp_path / out)
