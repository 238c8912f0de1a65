"""How Sphinx builds the pages: ``sphinx-build -W docs build/docs``."""

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
autodoc_typehints = "none"  # docstrings say what each argument takes
doctest_test_doctest_blocks = ""  # what runs is marked so: {doctest}, {testcode}

# What runs on the pages finds 64 photographs in data/train, and as records beside it, in a folder of its own.
_folder = tempfile.TemporaryDirectory(prefix="proxyloader-docs-")
doctest_global_setup = f"""
import multiprocessing, os, sys
from pathlib import Path
from torchvision.datasets import ImageFolder
multiprocessing.set_start_method("fork", force=True)  # what stands on a page cannot be imported by a worker
from proxyloader.make_dataset import make_dataset
os.chdir({_folder.name!r})
make_dataset("data/train", images=64)
sys.path.append({str(Path(__file__).parents[1])!r})
from tests.record_writers import write_caffe, write_tar, write_tfrecord
if not os.path.exists("data/train_lmdb"):  # once for all pages
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
    app.add_lexer("message", TextLexer)  # tests/test_docs.py looks for these messages in the package
    app.add_lexer("quote", TextLexer)  # a message of torch, DALI or the system
