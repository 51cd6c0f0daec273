"""Lets Levanter and Haliax trace and lower for devices that are not attached. Everything is put back on leaving."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import equinox as eqx
import haliax.jax_utils
import haliax.partitioning
import jax
import levanter.kernels.pallas.fused_cross_entropy_loss.api as cross_entropy
from jax._src import cloud_tpu_init, mesh
from jax._src.core import trace_state_clean

_NO_VALUE = object()


@contextmanager
def absent_devices(devices: Sequence[Any]) -> Generator[list[str]]:
    """In this context `jax.devices()` and its relatives, as Levanter and Haliax call them, answer for `devices`.

    JAX itself does not look its devices up by these names, so arrays still live on the devices that are there. Six more answers need
    devices that compute, or several hosts, and are replaced by ones that do without:

    * `haliax.….is_in_jit` makes an array on the mesh's devices; tracing is told from JAX's trace state instead.
    * `haliax.partitioning.is_array` keeps shapes from being lowered in the place of arrays.
    * `jax.ensure_compile_time_eval` computes on the mesh's devices, as rotary embeddings have it; here on those that are there.
    * the fused cross entropy has all hosts of the mesh agree on an implementation; here one host speaks for all.
    * JAX lowers Pallas kernels for the installed libtpu only where it knows itself on a TPU machine; it is told so.
    * its block sizes, where a model asks for its Pallas kernel, are the first of some candidates that the device's compiler takes; here
      the first one is taken untried, and the list that this context yields says so.
    """
    notes: list[str] = []

    def untried(*, impl_name: str, inferred: Any, **_) -> Any:
        note = (
            f"the blocks of the cross entropy's kernel {impl_name} are the ones that Levanter infers; the run takes others if these do not "
            "compile on the device or if its autotune cache has some"
        )
        if note not in notes:
            notes.append(note)
        return inferred

    platform = devices[0].platform

    def local(*_, **__):
        return [device for device in devices if device.process_index == devices[0].process_index]

    with ExitStack() as stack:
        for module, name, value in (
            (jax, "devices", lambda *_, **__: list(devices)),
            (jax, "local_devices", local),
            (jax, "device_count", lambda *_, **__: len(devices)),
            (jax, "local_device_count", lambda *_, **__: len(local())),
            (jax, "default_backend", lambda: platform),
            (jax, "ensure_compile_time_eval", partial(_compute_off_the_mesh, jax.ensure_compile_time_eval)),
            (haliax.jax_utils, "is_in_jit", _is_tracing),
            (haliax.partitioning, "is_in_jit", _is_tracing),
            (haliax.partitioning, "is_array", _is_array_or_shape),
            (cross_entropy, "_autotune_process_ids", lambda *_: (jax.process_index(),)),
            (cross_entropy, "_autotune_block_sizes_on_miss", untried),
            (cloud_tpu_init, "running_in_cloud_tpu_vm", platform == "tpu"),
        ):
            stack.enter_context(replaced(vars(module), name, value))
        # Its answer depends on the backend and is remembered.
        cross_entropy._default_implementations.cache_clear()
        stack.callback(cross_entropy._default_implementations.cache_clear)
        yield notes


@contextmanager
def replaced(namespace, name: str, value) -> Generator[None]:
    """Has `namespace[name]` be `value` for a while, and then again what it was before, or nothing."""
    before = namespace.get(name, _NO_VALUE)
    namespace[name] = value
    try:
        yield
    finally:
        if before is _NO_VALUE:
            del namespace[name]
        else:
            namespace[name] = before


@contextmanager
def jax_settings(values) -> Generator[None]:
    """Sets what a trainer sets in `jax.config`, and puts back what was there."""
    before = {name: getattr(jax.config, name) for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@contextmanager
def _compute_off_the_mesh(ensure_compile_time_eval) -> Generator[None]:
    # As jax.set_mesh(None), which refuses to be called here: it sees the trace, of which this is no part.
    with ensure_compile_time_eval(), mesh.use_abstract_mesh(mesh.empty_abstract_mesh):
        before = mesh.device_context.swap_local(mesh.empty_concrete_mesh)
        try:
            yield
        finally:
            mesh.device_context.set_local(before)


def _is_tracing() -> bool:
    return not trace_state_clean()


def _is_array_or_shape(x: object) -> bool:
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
