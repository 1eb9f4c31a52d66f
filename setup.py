import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = runpy.run_path(str(ROOT / "commgrid" / "version.py"))["VERSION"]  # imports no torch
# Transformers 5.15 and later make their meshes themselves, over all of WORLD.
INTEROP = ["transformers>=5.2,<5.15", "accelerate"]
# Those that examples/clients/ was run with; triton is what torchtitan imports.
CLIENTS = [
    "accelerate==1.15.0", "lightning==2.6.6", "deepspeed==0.19.8", "torchtitan==0.2.2", "triton",
]  # fmt: skip
VIZ = ["matplotlib>=3.8"]
RAY = ["ray>=2.40"]
COMPLETE = ["argcomplete>=3"]
SETUPTOOLS = "setuptools>=77"  # as pyproject.toml has it: the first that knows license expressions
DOCS = ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.30"]


def long_description() -> str:
    """The README as a package index shows it, which has no files beside it to show or link to."""
    parts = re.split(r"(^```.*?^```$)", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S)
    for i in range(0, len(parts), 2):  # between the blocks of code
        text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n?", "", parts[i])
        text = re.sub(r"<(?:img|source)\b(?![^>]*https?:)[^>]*>\n?|</?picture>\n?", "", text)
        text = re.sub(r"\[\]\([^)]*\)", "", text)  # a link around a picture
        parts[i] = re.sub(r"\[([^]]+)\]\((?!https?:|#)([^)#]+)[^)]*\)", r"\1 (`\2`)", text)
    return "".join(parts)


setup(
    name="commgrid",
    version=VERSION,
    description="The process-group grid of a Megatron-style training job",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The commgrid authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "distributed training",
        "process groups",
        "communicators",
        "tensor parallelism",
        "pipeline parallelism",
        "expert parallelism",
        "Megatron",
        "DeviceMesh",
        "NCCL",
        "PyTorch",
    ],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(
        include=["commgrid", "commgrid.*", "megatron_adapter", "megatron_adapter.*"]
    ),
    package_data={"commgrid": ["py.typed", "viz/*.html"], "megatron_adapter": ["py.typed"]},
    install_requires=["torch>=2.11,<2.16", "pyyaml"],
    extras_require={
        "interop": INTEROP,
        "clients": CLIENTS,
        "viz": VIZ,
        "docs": DOCS,
        "complete": COMPLETE,
        "ray": RAY,
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff==0.17.5",
            "mypy==2.4.1",
            "types-PyYAML",
            "megatron-core==0.16.1",
            "einops",  # which megatron-core makes its hierarchical groups with
            *INTEROP,
            *VIZ,
            *DOCS,  # which are built strictly
            *COMPLETE,
            "build>=1.2",  # sdist and wheel, without a network
            SETUPTOOLS,
        ],
    },
    entry_points={
        "console_scripts": ["commgrid = commgrid.cli:main"],
        "pytest11": ["commgrid = commgrid.testing.plugin"],
    },
)
