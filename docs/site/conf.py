"""The site: the pages of the repository, and a reference made from docstrings (``make docs``).

The source folder is the root of the repository, so that links between pages are those of the files.
"""

import sys
from pathlib import Path

import shardwise

sys.path.insert(0, str(Path(__file__).parent))

import reference

ROOT = Path(__file__).parents[2]

project = "Shardwise"
author = copyright = "The Shardwise authors"
version = release = shardwise.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "examples/**", "benchmarks/**.md"]
exclude_patterns = ["docs/site/**", "**/.*"]
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# What a method overrides is described once.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
# They would be copied for the side bar of every page, which takes a third of the time; each page begins with a list.
toc_object_entries = False

html_theme = "furo"
html_title = f"Shardwise {release}"
html_copy_source = False
html_show_sphinx = False
templates_path = ["templates"]
html_additional_pages = {"index": "start.html"}
html_static_path = ["static"]
html_css_files = ["site.css"]


# What the side bar shows, and then the other pages of docs/.
CONTENTS = {
    "Start": "docs/tutorials/tensor_parallel examples/tensor_parallel docs/reading docs/README",
    "Train": "docs/runs docs/metrics docs/optimizers docs/memory docs/python docs/loss docs/exact",
    "Fine-tune": "docs/tutorials/pretrained docs/tutorials/finetune docs/finetuning docs/chat_templates"
    " docs/huggingface docs/models docs/inference",
    "Grow": "docs/first-gpu docs/gpus docs/data_parallel docs/pipeline docs/context docs/experts",
    "Port": "docs/porting docs/porting_tensor_parallel docs/porting_models docs/porting_checkpoints"
    " examples/from_megatron/README examples/mpu_walkthrough/README",
    "Debug": "docs/doctor docs/conformance examples/conformance/README benchmarks/results/conformance-2026-11-26",
    "Extend": "docs/design docs/decisions/README CONTRIBUTING benchmarks/README CHANGELOG",
    "Reference": "docs/api/index",
}


def add_contents(app, docname, source):
    """Add the tables of contents to the first page and the decisions, whose files are read without Sphinx too."""
    if docname == root_doc:
        listed = " ".join(CONTENTS.values()).split()
        others = [f"docs/{path.stem}" for path in sorted((ROOT / "docs").glob("*.md"))]
        contents = CONTENTS | {"More": " ".join(page for page in others if page not in listed)}
        for caption, pages in filter(all, contents.items()):
            entries = "\n".join(f"/{page}" for page in pages.split())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"
    if docname == "docs/decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"


def setup(app):
    reference.write(ROOT / "docs" / "api")
    app.connect("source-read", add_contents)
