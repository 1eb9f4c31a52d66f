from pathlib import Path

from setuptools import find_packages, setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
# Transformers 5.15 and later make their meshes themselves, over all of WORLD.
INTEROP = ["transformers>=5.2,<5.15", "accelerate"]
# Those that examples/clients/ was run with; triton is what torchtitan imports.
CLIENTS = [
    "accelerate==1.15.0", "lightning==2.6.6", "deepspeed==0.19.8", "torchtitan==0.2.2", "triton",
]  # fmt: skip
VIZ = ["matplotlib>=3.8"]
DOCS = ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.30"]

setup(
    name="commgrid",
    version="0.1.0",
    description="The process-group grid of a Megatron-style training job",
    long_description=README,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(
        include=["commgrid", "commgrid.*", "megatron_adapter", "megatron_adapter.*"]
    ),
    package_data={"commgrid": ["py.typed", "viz/page.html"], "megatron_adapter": ["py.typed"]},
    install_requires=["torch>=2.11,<2.16", "pyyaml"],
    extras_require={
        "interop": INTEROP,
        "clients": CLIENTS,
        "viz": VIZ,
        "docs": DOCS,
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
        ],
    },
    entry_points={"console_scripts": ["commgrid = commgrid.cli:main"]},
)
