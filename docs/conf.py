"""Sphinx configuration: ``sphinx-build -W docs build/docs``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

import proxyloader

project = "proxyloader"
author = "the proxyloader authors"
copyright = author
version = release = proxyloader.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings describe the arguments
doctest_test_doctest_blocks = ""  # run only {doctest} and {testcode}

# Code on the pages runs in a temporary folder with 64 photographs in data/train, and the same as records.
_folder = tempfile.TemporaryDirectory(prefix="proxyloader-docs-")
doctest_global_setup = f"""
import multiprocessing, os, sys
from pathlib import Path
from torchvision.datasets import ImageFolder
multiprocessing.set_start_method("fork", force=True)  # workers cannot import code from a page
from proxyloader.make_dataset import make_dataset
os.chdir({_folder.name!r})
make_dataset("data/train", images=64)
sys.path.append({str(Path(__file__).parents[1])!r})
from tests.record_writers import write_caffe, write_tar, write_tfrecord
if not os.path.exists("data/train_lmdb"):  # only once for all pages
    samples = ImageFolder("data/train").samples
    write_caffe(Path("data/train_lmdb"), samples)
    write_tar(Path("data/train.tar"), samples)
    write_tfrecord(Path("data/train.tfrecord"), samples)
"""

html_theme = "furo"
html_title = f"proxyloader {version}"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_show_copyright = False


def setup(app: Sphinx) -> None:
    app.add_lexer("message", TextLexer)  # a message of this package; see tests/test_docs.py
    app.add_lexer("quote", TextLexer)  # a message of torch, DALI or the operating system
