"""Package metadata. The run-time requirements are listed once, in requirements.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# The OpenAI-compatible server (python -m envace_jax.serve): routes, HTTP, and /metrics. uvicorn takes its loop and its
# parser from uvloop and httptools where they are there.
SERVE = ["fastapi>=0.115", "pydantic>=2.10", "uvicorn>=0.34", "prometheus-client>=0.21"]
SERVE += ["httptools>=0.6", "uvloop>=0.21; sys_platform != 'win32'"]
PAGE = [f"reporting/{name}" for name in ("*.html", "*.css", "*.js", "vendor/*")]  # what a report is made of
ROOT = Path(__file__).resolve().parent


def requirements() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    return [line for line in lines if line]


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"', (ROOT / "envace_jax" / "__init__.py").read_text(), re.MULTILINE)
    assert found, "envace_jax/__init__.py has no __version__"
    return found.group(1)


def description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text() if readme.exists() else ""


setup(
    name="envace-jax",
    version=version(),
    description="EnvACE in JAX: train tool-using language-model agents by world rehearsal",
    long_description=description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["envace_jax", "envace_jax.*"]),
    package_data={"envace_jax": ["py.typed", "assets/**/*", "serving/*.html", *PAGE]},
    install_requires=requirements(),
    extras_require={
        # transformers is the outside reference for chat templates and weights. Parity with its models also needs torch,
        # left out because a plain `torch` brings gigabytes of CUDA: those tests skip without it, and .ci/run says which
        # CPU build to install.
        "test": [
            *["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "transformers>=5.0", "jinja2>=3.1"],
            *["ruff>=0.12", "mypy>=1.15", "setuptools>=77"],  # the last builds the wheel that is tried
            "pyte>=0.8.2",  # emulates the terminal that the live panel is looked at on
            *[*SERVE, "httpx>=0.28", "openai>=2.0"],  # the server and clients to try it with
        ],
        "serve": SERVE,
        "wandb": ["wandb>=0.19"],  # logging.tracker
        "trackio": ["trackio>=0.20"],
        # The site of docs/: its look, the reference out of docstrings, and equations as MathML, which need no script.
        "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.30,<2", "latex2mathml>=3.77,<4"],
        "tpu": ["jax[tpu]"],
        "plan": ["libtpu==0.0.52"],  # compiles for TPUs on a machine without one; the one that jax 0.10.2 is made for
        "cuda": ["jax[cuda13]"],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
