"""The documentation: every code block of every page is run or says why not, what it names exists, and the site builds.

What is not run is checked as far as that goes: flags, settings and names. `docs_blocks.py` says how blocks are marked.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import docs_blocks
import pytest
from conftest import REPOSITORY
from docs_blocks import PAGES, blocks, elsewhere, page_name, prose

from envace_jax import config as configuration
from envace_jax import grpo, main, parts
from envace_jax.config import model_path
from envace_jax.models import hf

NAMES = [page_name(path) for path in PAGES]
# What pages begin with, so that every training run is two small steps; what a block says itself comes later and counts.
SMALL = (
    "--config.steps=2 --config.warm_up=False --config.optimizer.schedule=constant --config.checkpoint.every=1 "
    "--config.data.count=40 --config.data.tasks_per_step=4 --config.data.attempts=2 '--config.batch.row_buckets=(16,)' "
    "--config.sampler.slots=8 --config.sampler.cache_rows=16 '--config.sampler.prefill_lengths=(64,440)' "
    "--config.evaluation.heldout_tasks=4 --config.evaluation.samples=1 --config.evaluation.greedy=False "
    "--config.evaluation.unseen_tasks=2 --config.evaluation.fidelity_calls=4 --config.logging.tensorboard=False"
)
TINY = "--config=configs/tiny.py"


def of_page(page):
    """The blocks that are this file's to run or check."""
    return [] if elsewhere(page) else blocks(page)


# --- what is written ---


def test_there_are_pages_and_every_block_is_found():
    assert {"index.md", "quickstart.md", "method.md", "faq.md", "reference/index.md"} <= set(NAMES)
    assert sum(len(blocks(page)) for page in NAMES) > 80
    for page in NAMES:
        text = (docs_blocks.DOCS / page).read_text()
        assert text.count("```") == 2 * len(blocks(page)), page
        assert "~~~" not in text, page
        outside = re.sub(r"(?m)^ *([*-]|\d+\.) .*(\n+( {2,}.*|))*", "", prose(page))  # lists go on indented
        if not page.startswith("reference/"):
            assert not re.search(r"(?m)^\n {4,}\S", outside), f"docs/{page}: an indented block; fence it"


@pytest.mark.parametrize("page", NAMES)
def test_blocks_say_what_they_are(page):
    if test := elsewhere(page):
        assert (REPOSITORY / test).is_file() and blocks(page), page
    printed = False  # whether a text block may follow
    for block in of_page(page):
        assert block.language in docs_blocks.LANGUAGES, f"{block}: language {block.language!r}"
        if block.language == "text" and not block.reason:
            assert printed, f"{block}: nothing above it prints this; say `<!-- not run: WHY -->` above"
        if block.language in ("csv", "json", "slurm"):
            assert block.name or block.reason, f"{block}: neither a file nor marked"
        printed = block.language in ("bash", "python") and not block.reason
        assert not (block.name and block.reason)


@pytest.mark.parametrize("page", NAMES)
def test_blocks_are_well_formed(page, monkeypatch):
    """They parse; commands take their flags and settings; imported names are there."""
    monkeypatch.chdir(REPOSITORY)
    for block in of_page(page):
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("envace_jax"):
                    check_import(node)
        elif block.language == "bash":
            done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, check=False)
            assert done.returncode == 0, f"{block}: {done.stderr}"
        elif block.language == "json":
            json.loads(block.text)
        if block.language == "bash":
            for target, arguments in docs_blocks.commands(block.text):
                docs_blocks.check_command(target, arguments)
        for name in re.findall(r"--config\.([a-z_0-9.]+)=", block.text):
            assert configuration.unknown_setting(name) is None, f"{block}: {name}"


def check_import(node):
    module = importlib.import_module(node.module)
    for alias in node.names:
        if not hasattr(module, alias.name):
            importlib.import_module(f"{node.module}.{alias.name}")


GROUPS = [name for name, value in configuration.to_json(configuration.RunConfig()).items() if isinstance(value, dict)]


@pytest.mark.parametrize("page", NAMES)
def test_settings_files_and_tests_that_a_page_names_exist(page):
    text = prose(page)
    for name in re.findall(rf"`((?:{'|'.join(GROUPS)})\.(?!jsonl|json|py\b|md\b|npz)[a-z_0-9]+)[=`]", text):
        known = configuration.unknown_setting(name) is None
        group, _, last = name.partition(".")
        assert known or is_attribute(group, last), f"docs/{page}: {name}"
    places = set(re.findall(r"`((?:envace_jax|experiments|configs|tests|docs)/[\w./-]*\w)", text))
    for path in places:
        assert (REPOSITORY / path).exists(), f"docs/{page}: {path}"
    for path, test in re.findall(r"`(tests/\w+\.py)::(\w+)", text):
        assert f"def {test}(" in (REPOSITORY / path).read_text(), f"docs/{page}: {path}::{test}"


def is_attribute(module, name):
    """`grpo.policy_loss` is a function and no setting."""
    with contextlib.suppress(ImportError):
        return hasattr(importlib.import_module(f"envace_jax.{module}"), name)
    return False


# --- what runs ---


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A folder with the run that the pages speak of, made by the quickstart's command, two steps small."""
    folder = tmp_path_factory.mktemp("site")
    place(folder)
    shell(f"python -m envace_jax.main {TINY}", folder)
    return folder


def place(folder):
    for name in ("configs", "experiments"):
        (folder / name).symlink_to(REPOSITORY / name)


def shell(text, folder):
    """What a shell prints for the block; the test fails with it where the block fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        ["bash", "-e", "-c", text.replace(TINY, f"{TINY} {SMALL}")], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def small_config():
    arguments = [argument.strip("'") for argument in SMALL.split()]
    for name in ("limits.act_context=640", "sampler.max_length=640", "sampler.cache_lengths=(640,)"):
        arguments.append(f"--config.{name}")
    return main.read_flags(["docs", f"--config={REPOSITORY}/configs/tiny.py", *arguments])[0]


def a_player():
    """What docs/rehearsal.md's example is given."""
    from envace_jax.chat import load_tokenizer
    from envace_jax.envs import tiny
    from envace_jax.rewards.checklist import ChecklistReward
    from envace_jax.sharding import make_mesh

    config, mesh, folder = small_config(), make_mesh(1, 1, 1), model_path("asset:tiny_base")
    model, params = hf.load(folder, mesh)
    policy, chat = parts.make_policy(config, model, mesh), load_tokenizer(folder)
    return {
        "sampler": parts.make_sampler(config, policy, chat, mesh), "params": policy.for_decoding(params),
        "prompts": parts.make_prompts(config, chat), "limits": parts.make_limits(config),
        "reward": ChecklistReward(), "task": tiny.tasks("heldout", 1, 0)[0],
    }  # fmt: skip


def a_server():
    """What docs/serving.md's last block is given."""
    from envace_jax import serve
    from envace_jax.serving.app import Options, make_app

    return {"serve": serve, "make_app": make_app, "Options": Options, "config": small_config()}


GIVEN = {"rehearsal.md": a_player, "serving.md": a_server}


def follow(page, folder, names):
    """Does what the page says, in order; gives how many blocks were run and how many outputs compared."""
    ran, compared, printed = 0, 0, ""
    names["__name__"] = "__main__"
    for block in of_page(page):
        if block.reason:
            continue
        if block.name:
            (folder / block.name).write_text(block.text)
        elif block.language == "bash":
            printed, ran = shell(block.text, folder), ran + 1
        elif block.language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.chdir(folder):
                exec(compile("\n" * block.line + block.text, f"docs/{page}", "exec"), names)
            printed, ran = output.getvalue(), ran + 1
        elif block.language == "text":
            printed += "" if printed.endswith("\n") else "\n"
            matches = doctest.OutputChecker().check_output(block.text, printed, doctest.ELLIPSIS)
            assert matches, f"{block}: the page says\n{block.text}\nand what is above it printed\n{printed}"
            compared += 1
    return ran, compared


RUN = [page for page in NAMES if any(b.language in ("bash", "python") and not b.reason for b in of_page(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_what_a_page_says_happens(page, tmp_path, request, monkeypatch):
    monkeypatch.setitem(grpo.LOSSES, "soft", None)  # docs/howto_loss.md puts one there, which is to go again
    place(tmp_path)
    # The quickstart trains by itself; the others speak of a run that is there.
    if page != "quickstart.md" and any("runs/" in block.text or TINY in block.text for block in of_page(page)):
        shutil.copytree(request.getfixturevalue("finished_run") / "runs", tmp_path / "runs")
    ran, _ = follow(page, tmp_path, GIVEN.get(page, dict)())
    assert ran == sum(b.language in ("bash", "python") and not b.reason and not b.name for b in of_page(page))


def test_what_is_wrong_on_a_page_is_noticed(tmp_path, monkeypatch):
    """A page whose output differs, whose block fails, or that has a block nobody marked, fails."""

    def page(text):
        (tmp_path / "page.md").write_text(text)
        return follow("page.md", tmp_path, {})

    monkeypatch.setattr(docs_blocks, "DOCS", tmp_path)
    fence = "`" * 3
    assert page(f"{fence}python\nprint(1 + 1)\n{fence}\n\n{fence}text\n2\n{fence}\n") == (1, 1)
    with pytest.raises(AssertionError, match="the page says"):
        page(f"{fence}bash\necho 1\n{fence}\n\n{fence}text\n2\n{fence}\n")
    with pytest.raises(AssertionError, match="^false"):
        page(f"{fence}bash\nfalse\n{fence}\n")
    with pytest.raises(ZeroDivisionError):
        page(f"{fence}python\n1 / 0\n{fence}\n")
    assert page(f"<!-- not run: a TPU -->\n{fence}bash\nfalse\n{fence}\n") == (0, 0)
    for text in (f"{fence}text\nalone\n{fence}\n", f"{fence}\nno language\n{fence}\n", f"{fence}json\n{{}}\n{fence}\n"):
        (tmp_path / "page.md").write_text(text)
        with pytest.raises(AssertionError, match="page.md:1"):
            test_blocks_say_what_they_are("page.md")
    for command in ("main --config=configs/tiny.py --config.grpo.clip=1", "evaluate --bench=tiny", "serve --port=x"):
        (tmp_path / "page.md").write_text(f"{fence}bash\npython -m envace_jax.{command}\n{fence}\n")
        with pytest.raises((AssertionError, ValueError)):
            test_blocks_are_well_formed("page.md", monkeypatch)


# --- the site ---


class Outside(HTMLParser):
    """Addresses of what a page would fetch by itself: links are not fetched."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        fetched = [values.get("src"), values.get("srcset"), values.get("data")]
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            fetched.append(values.get("href"))
        self.found += [value for value in fetched if value and re.match(r"(https?:)?//", value)]


@pytest.mark.slow
def test_the_site_builds_with_every_link_right_and_nothing_from_outside(tmp_path):
    pytest.importorskip("mkdocs", reason="the docs extra is not installed; .ci/run installs it")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    built = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {f"{name.removesuffix('.md')}.html" for name in NAMES} <= set(built)
    for name, text in built.items():
        reader = Outside()
        reader.feed(text)
        assert not reader.found, (name, reader.found)
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", path.read_text()), path
    assert built["method.html"].count("<math") >= 10 and "\\frac" not in built["method.html"]
    assert built["index.html"].count('class="figure"') == 1 and "role_advantages" in built["reference/training.html"]
    assert (site / "repository/experiments/results/ablations.png").is_file()
    assert "javascripts/iframe-worker.js" in built["index.html"] and (site / "javascripts/iframe-worker.js").is_file()
