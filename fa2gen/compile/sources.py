"""Rendered kernels from the cache: what a first call of a process needs when its cubin is there already.

Rendering reads, folds and prunes the whole text: 12 to 30 ms a kernel, and 110 to 140 ms for the first of a process. A
stored text takes 1 ms. Its key hashes the spec, the config and every file that decides what is rendered, so an edit to
a template or to the rendering itself never finds an old text.
"""

from __future__ import annotations

import functools
import json

import jinja2

from ..codegen import KernelSource, entry_name, render_kernel, renderer_hash
from ..codegen.render import launch_size
from ..spec import Config, KernelSpec
from .cache import SOURCE
from .entry import FORMAT, Contents, Entry, sha256
from .location import cache_root
from .store import EntryStore

SECTION = "sources"


def kernel_source(spec: KernelSpec, config: Config, kernel: str | None = None) -> KernelSource:
    """A kernel's CUDA source: :func:`fa2gen.codegen.render_kernel`'s, from the cache if it is there.

    Args:
        spec: What the kernel computes.
        config: How; legal for the spec.
        kernel: Which of the kind's kernels; None: the main one.

    Raises:
        CacheError: $FA2GEN_CACHE_DIR cannot be used safely.
        TemplateError: A template is not written as the pruning reads it.
    """
    root, kernel = cache_root(), kernel or spec.kind
    if root is None:
        return render_kernel(spec, config, kernel=kernel)
    rendered: list[KernelSource] = []

    def contents() -> Contents:
        rendered.append(render_kernel(spec, config, kernel=kernel))
        (source,) = rendered
        facts = {"kernel": source.entry, "target": "any", "body_chars": len(source.body)}
        return Contents({SOURCE: source.text.encode()}, facts)

    entry, _ = EntryStore(root, SECTION).read_or_build(_key(spec, config, kernel), (SOURCE,), contents)
    if entry.lease is not None:
        entry.lease.close()
    if rendered:
        return rendered[0]
    return _restored(spec, config, kernel, entry) or render_kernel(spec, config, kernel=kernel)


def _restored(spec: KernelSpec, config: Config, kernel: str, entry: Entry) -> KernelSource | None:
    """None if the entry's facts are not what :func:`kernel_source` writes."""
    text, body_chars = entry.files[SOURCE].decode(), entry.facts.get("body_chars")
    if not isinstance(body_chars, int) or not 0 < body_chars <= len(text):
        return None
    return KernelSource(
        spec,
        config,
        kernel,
        "cuda",
        text,
        text[-body_chars:],
        entry_name(spec, config, kernel),
        *launch_size(spec, config, kernel),
    )


def _key(spec: KernelSpec, config: Config, kernel: str) -> str:
    return sha256(json.dumps([FORMAT, _renderer(), kernel, spec.canonical(), config.canonical()]).encode())


@functools.cache
def _renderer() -> str:
    return f"{renderer_hash()} jinja2 {jinja2.__version__}"
